"""A sorted draft of any Llama: cut off its first layers, train all exits, measure thresholds, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.config import read_folder
from ..checkpoint.files import taken
from ..checkpoint.load import empty_model, load_model
from ..checkpoint.notices import tell
from ..checkpoint.save import save_model
from ..checkpoint.tokenizer import Tokenizer
from ..mcsd.decision import fingerprint
from ..model import Llama
from ..pair.names import find_target
from ..soft import cross_entropy, exit_states, sum_of_chunks
from .data import make_rows, read_dialogues, read_records
from .fit import Divided, Recipe, Rows, Run, count_ranks, fit

MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3, millions=1.5)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(batch=128, micro_batch=2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)
HELD_OUT = 64  # rows, at most
FEWEST = 1000  # labelled tokens from which thresholds mean something
LOST = 0.01  # the part of the last exit's right tokens that an exit before it may lose


@dataclass(frozen=True)
class Teacher:
    """A second term of the loss: at every exit, the draft also imitates a model of its vocabulary.

    By default it learns the teacher's distributions: the term is KL(p || q), where the teacher has
    p and an exit q (arXiv 2310.08461, section 3). With ``align`` it learns features instead, as in
    S2D's ablation, which comes without a formula. Chosen here: features are what the LM head reads,
    and the term is their mean squared difference, times ``align``.
    """

    model: Llama = field(repr=False)
    align: float | None = None

    def loss(self, draft: Llama, hidden: Tensor, labels: Tensor, taught: Tensor) -> Tensor:
        """Cross entropy and the term, for hidden states and the teacher's features, over N."""
        loss = cross_entropy(draft, hidden, labels)
        if self.align is not None:
            difference = draft.model.norm(hidden).float() - taught.float()  # (N, hidden)
            return loss + self.align * difference.square().mean(dim=-1).sum()
        with torch.no_grad():
            log_p = self.model.lm_head(taught).float().log_softmax(dim=-1)  # (N, V)
        log_q = draft.logits(hidden).float().log_softmax(dim=-1)  # (N, V)
        return loss + (log_p.exp() * (log_p - log_q)).sum()

    def losses(self, draft: Llama, tokens: Tensor, labels: Tensor, exits: Sequence[int]) -> Tensor:
        """As ``soft_losses``, with the teacher's term added at every exit."""
        learnt = labels != -100  # (B, T)
        with torch.no_grad():  # what the teacher's LM head reads
            states = self.model.run_layers(self.model.embed(tokens))
            taught = self.model.model.norm(states[learnt])  # (N, the teacher's hidden size)
        losses = []
        for states in exit_states(draft, tokens, exits):
            rows = states[learnt], labels[learnt], taught  # N of each
            losses.append(sum_of_chunks(partial(self.loss, draft), *rows))
        return torch.stack(losses)


def train_soft(run: Run, data: str = "mini", **options: Any) -> None:
    """Train a sorted draft and write it to ``run.out``; a training that was interrupted goes on.

    ``options`` are fields of the recipe, ``init`` and ``exits`` at least. The others are those of
    MINI or, if ``data`` is a file, of PAPER. A teacher's loss takes the place of the recipe's.
    Raises ValueError or OSError for what cannot be trained.
    """
    recipe = replace(MINI if data == "mini" else PAPER, data=data, **options)
    exits = recipe.exits
    if recipe.batch % count_ranks():
        raise ValueError(f"--batch is no multiple of the {count_ranks()} processes")
    records = read_records(data, run.seed)
    folder = read_folder(find_target(recipe.init))
    if not exits or list(exits) != sorted(set(exits)) or exits[0] < 1:
        raise ValueError(f"exits must increase, from 1, got {list(exits)}")
    if len(recipe.weights) not in (0, len(exits)):
        raise ValueError(f"--weights: expected one for each of {len(exits)} exits")
    most = folder.config.max_position_embeddings
    if recipe.length > most:
        raise ValueError(f"{folder.path} has a context of {most} tokens; give --length {most}")
    if recipe.align is not None and recipe.teacher is None:
        raise ValueError("--align is about the features of a --teacher; give both")
    with taken(run.out):
        model = Divided(load_model(folder, run.device, "float32", quick=False, layers=exits[-1]))
        if recipe.teacher is not None:
            teacher = load_model(find_target(recipe.teacher), run.device, quick=False)
            if teacher.config.vocab_size != folder.config.vocab_size:
                raise ValueError("--teacher: it has another vocabulary than the draft")
            if recipe.align and teacher.config.hidden_size != folder.config.hidden_size:
                raise ValueError("--align: the teacher is not as wide as the draft")
            name = f"{recipe.teacher} ({fingerprint(teacher.model.norm.weight)})"
            recipe = replace(recipe, teacher=name, loss=Teacher(teacher, recipe.align).losses)
        tokenizer = Tokenizer(folder.path, folder.config.vocab_size)
        eos = folder.config.eos_token_ids
        ends = [tokenizer.special.get(each) or tokenizer.decode([each]) for each in eos]
        dialogues = read_dialogues(data, records, tokenizer, ends, not recipe.all_text)
        rows = make_rows(dialogues, recipe.batch, recipe.length, recipe.millions)
        dialogues.close()  # now it tells what was passed over
        learnt, held_out = hold_out(rows, recipe.batch)
        if not torch.isin(learnt[1], torch.tensor(eos, dtype=torch.int32)).any():
            tell(f"{data}: no answer ends with an EOS of {folder.path}, so no end is learnt")
        for _ in fit(model, learnt, recipe, run):
            pass  # it says itself how far it is
        drafting: dict[str, Any] = {"exits": exits}
        held = (held_out[1] != -100).sum().item()
        how = f"thresholds not measured: it takes {FEWEST} tokens held out, and there are {held}"
        if held >= FEWEST:
            drafting["thresholds"] = model(measure_thresholds, held_out, exits)
            how = f"thresholds {drafting['thresholds']}, measured on {held} tokens"
        save_trained(model, drafting, run, folder.path)
    count = (learnt[1] != -100).sum()
    tell(f"{run.out}: learnt from {len(learnt[0])} rows with {count} tokens to predict")
    tell(f"exits {exits}, {how}")


def save_trained(model: Divided, drafting: dict[str, Any], run: Run, tokenizer_from: Path) -> None:
    """Write a trained model to ``run.out``, and how it drafts. No checkpoint is left."""
    weights = model.gather()
    if weights:  # on rank 0
        whole = empty_model(model.model.config)
        whole.drafting = drafting
        whole.load_state_dict(weights, assign=True)
        save_model(whole, run.out, tokenizer_from)
        run.unfinished.unlink(missing_ok=True)


def hold_out(rows: Rows, batch: int) -> tuple[Rows, Rows]:
    """The rows to learn from, at least a ``batch``, and the last twentieth, which is held out."""
    tokens, labels = rows
    kept = max(batch, len(tokens) - min(HELD_OUT, len(tokens) // 20))
    return (tokens[:kept], labels[:kept]), (tokens[kept:], labels[kept:])


@torch.no_grad()
def measure_thresholds(model: Llama, rows: Rows, exits: Sequence[int]) -> tuple[float, ...]:
    """A threshold for each of ``exits``, by ``lowest_threshold``; the last exit always drafts.

    The ``rows`` are some that the model has not learnt from, with FEWEST labelled tokens or more.
    """
    parts = []
    for tokens, labels in zip(*(each.to(model.device) for each in rows)):
        learnt = labels != -100  # (T,)
        found = []
        for states in exit_states(model, tokens[None], exits):
            probs = model.logits(states[0, learnt]).float().softmax(dim=-1)  # (N, V)
            confidence, choices = probs.max(dim=-1)
            found.append(torch.stack((confidence, choices == labels[learnt])))
        parts.append(torch.stack(found, dim=1))  # (2, E, N)
    confidence, right = torch.cat(parts, dim=2)  # (E, N) each
    before_last = zip(confidence[:-1], right[:-1])
    thresholds = [lowest_threshold(*each, right_at_last=right[-1]) for each in before_last]
    return (*thresholds, 0.0)


def lowest_threshold(confidence: Tensor, right: Tensor, right_at_last: Tensor) -> float:
    """The lowest threshold from which on an exit is almost as good as the last one.

    An exit drafts where its ``confidence`` (N,) is above the threshold, and is ``right`` (N,) at
    some of these tokens, as the last exit would have been. The exit may lose a hundredth (LOST) of
    all tokens at which the last exit is right. An example: of 1000 tokens the last exit gets 900
    right, so 9 may be lost. Above 0.7 the last exit gets 5 tokens more right than this one, above
    0.6 it is 9, and above 0.5 it is 20. Then the threshold is 0.6.
    """
    order = confidence.argsort(descending=True)
    lost = (right_at_last - right)[order].cumsum(dim=0)  # (N,)
    enough = confidence[order][lost <= LOST * right_at_last.sum()].tolist()
    return round([1.0, *enough][-1], 3)
