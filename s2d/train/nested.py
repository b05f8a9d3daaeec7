"""A sorted draft of any Llama: cut off its first layers, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4). Knows nothing about
gradients and steps.
"""

from dataclasses import replace

import torch

from ..extras.draft_head import DraftHead
from ..files import remove_ours
from ..program import tell
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import load_model, save_adapter, save_model
from .dialogues import dialogues_of, one_a_row, pack
from .distributed import gathered
from .fit import Recipe, checkpoint_of, fit_and_tell
from .lora import SCALE, adapter_pairs, add_adapters
from .self_text import likeliest, sample_to

MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3)
SELF = Recipe(batch=8, micro_batch=8, length=256, lr=6e-4, epochs=2, weight_decay=0.0)
ADAPTER_LR = 1.5e-3  # of adapters, which bear more than whole weights do
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(128, 4, length=2048, lr=2e-5, epochs=3, weight_decay=0.0, recompute=True)


def corpus_rows(millions, recipe):
    """How many rows, in whole batches, about so many million tokens make."""
    least = recipe.batch * recipe.length / 1e6
    if not least <= millions < 1e6:
        expected = f"at least {least:g} million tokens, one batch, and less than 1e+06"
        raise ValueError(f"expected {expected}; got {millions:g}")
    return round(millions * 1e6 / (recipe.batch * recipe.length)) * recipe.batch


def rows_of(init, data, run, recipe, millions=None, text=None, answers_only=True):
    """Text for the Llama in ``init``: (tokens, labels), (R, length) each, see ``pack``.

    ``data`` is "mini", "self" (its text is kept in the file ``text``) or a ShareGPT file.
    """
    if data == "self":
        target, _, pairs = sample_to(text, init, millions, run)
        tokens, labels = one_a_row(pairs, recipe.length)
        labels = likeliest(target, tokens, labels)
    else:
        rows = corpus_rows(millions, recipe) if data == "mini" else None
        how = rows, recipe.length, answers_only, chat_template(init)
        tokens, labels = pack(dialogues_of(data, run.seed), Tokenizer(init), *how)
    if len(tokens) < recipe.batch:
        found = f"{data} gives {len(tokens)} rows of {recipe.length} tokens"
        raise ValueError(f"{found}; one batch needs {recipe.batch}")
    return tokens, labels


def cut(init, exits, device, drafting=None):
    """The first layers of the Llama in ``init``, up to the last of ``exits``, ready to learn.

    ``drafting``: the defaults for its config, unless given the paper's thresholds.
    """
    model = load_model(init, device, "float32", exits[-1], quick=False).requires_grad_(True)
    drafting = drafting or {"thresholds": (0.5,) * (len(exits) - 1) + (0.0,)}
    model.config = replace(model.config, exit_layers=exits, **drafting)
    return model


def train_and_save(model, exits, rows, recipe, run, init, distillation=None, rank=None, keep=None):
    """Train all ``exits`` of ``model`` together on ``rows``, then write it to ``run.out``.

    With a ``rank`` only adapters are learnt. With ``keep`` it drafts only so many tokens, its
    labels' commonest. ``init`` is the folder it comes from: its tokenizer is copied along, or an
    adapter's base.
    """
    tokens, labels = rows
    if keep is not None:
        tokens_kept = most_frequent(labels, keep, model.config.vocab_size)
        model.draft_head = DraftHead(model.lm_head, tokens_kept)
        labels = among(tokens_kept, labels, model.config.vocab_size)
    if rank:
        add_adapters(model, rank, run.seed)
    fit_and_tell(model, exits, (tokens, labels), recipe, run, distillation)
    if whole := gathered(model, run.mesh):  # on rank 0
        if rank:
            save_adapter(whole, adapter_pairs(whole), SCALE, run.out, init, run.replace)
        else:
            save_model(whole, run.out, init, replace=run.replace)
        remove_ours(checkpoint_of(run.out), "checkpoint")


def most_frequent(labels, count, vocab_size):
    """The ``count`` commonest tokens among ``labels``, in order of their ids."""
    if not 1 <= count <= vocab_size:
        raise ValueError(f"a draft vocabulary has from 1 to {vocab_size} tokens, got {count}")
    frequencies = labels[labels >= 0].bincount(minlength=vocab_size)
    return frequencies.argsort(descending=True, stable=True)[:count].sort().values


def among(kept, labels, vocab_size):
    """``labels`` by their positions among the ``kept`` tokens (K,); others are not learnt."""
    positions = torch.full((vocab_size + 1,), -100, dtype=torch.int32)
    positions[kept] = torch.arange(len(kept), dtype=torch.int32)
    found = positions[labels.where(labels >= 0, vocab_size)]
    learnt, inside = (labels >= 0).sum().item(), (found >= 0).sum().item()
    outside = 1 - inside / max(1, learnt)
    tell(f"draft vocabulary: {outside:.1%} of {learnt} tokens are outside")
    return found
