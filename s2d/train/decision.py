"""Training a decision model (decision.py): draft, let the target verify, learn from that.

Improved MCSD (arXiv 2409.10644, "decision model").
"""

from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..checkpoint import load_model
from ..checkpoint.chat import Message
from ..checkpoint.config import read_drafting
from ..checkpoint.names import is_same_folder, refuse_whole_target
from ..checkpoint.tokenizer import Tokenizer
from ..decision import Decision, fingerprint, save_decision
from ..decoder import Step
from ..draft import LayerExit
from ..files import read_json, refuse_other_than_file
from ..generation import start
from ..model import Llama
from ..notices import progress, tell
from ..rules import Prediction, Proposal
from ..tree import Tree
from .dialogues import Counts, check_data, encode_dialogues
from .fit import Run
from .self_text import ask, find_ways_to_ask

LEARNING_RATE = {"hidden": 1e-3, "stats": 5e-3}  # at its peak, by features
FEATURES = tuple(LEARNING_RATE)
DRAFT_LENGTH = 10
THRESHOLD = 0.4  # drafting stops where no path is as likely to be accepted as this


def collect(
    decision: Decision, target: Llama, draft: Llama, prompts: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Features (M, F) and acceptance probabilities (M,) of every token drafted at T = 0 and 1.

    What is drafted are chains: the exits are asked once for each of their tokens.
    """
    inputs: list[Tensor] = []
    labels: list[Tensor] = []

    class Remember:
        """A decision model that never stops; it notes the features of each drafted token."""

        threshold = 0.0

        def judge(
            self, used: LayerExit, tree: Tree, prediction: Prediction, proposal: Proposal
        ) -> list[list[float]]:
            inputs.append(decision.inputs(used, tree, prediction))
            return proposal.probs

        def prepare_for(self, draft: Llama) -> None:
            pass

    for temperature in (0.0, 1.0):
        what = f"answers to draft for at temperature {temperature:g}"
        for seed, prompt in enumerate(progress(prompts, what, len(prompts))):
            steps = start(
                target,
                prompt,
                draft,
                temperature=temperature,
                seed=seed,
                draft_length=DRAFT_LENGTH,
                rule="rejection",
                decision=Remember(),
            )
            for step in steps:
                labels.append(acceptance_of(step, temperature))
    return torch.cat(inputs), torch.cat(labels)


def acceptance_of(step: Step, temperature: float) -> Tensor:
    """Acceptance probabilities (N,) of a step's chain: min(1, p / q), one-hot at T = 0."""
    logits = step.logits[:-1].float()  # (N, V)
    tokens = torch.tensor(step.tree.tokens, device=logits.device)  # (N,)
    if temperature == 0:
        return (logits.argmax(dim=-1) == tokens).float()
    p = logits.softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    paths = logits.new_tensor([1.0, *step.tree.probs])  # (N + 1,), products of q along the chain
    q = paths[1:] / paths[:-1]
    return (p / q).clamp(max=1.0)


def fit_decision(
    decision: Decision, features: Tensor, labels: Tensor, epochs: int, seed: int
) -> None:
    """Learn ``labels`` (M,) from ``features`` (M, F) by cross entropy and AdamW, in place."""
    generator = torch.Generator().manual_seed(seed)
    peak = LEARNING_RATE[decision.features]
    optimizer = torch.optim.AdamW(decision.parameters(), lr=peak, weight_decay=0.01)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = peak * (1 - epoch / epochs)
        for rows in torch.randperm(len(labels), generator=generator).to(labels.device).split(256):
            logits = decision.layers(features[rows])[:, 0]  # without the sigmoid of ``forward``
            loss = binary_cross_entropy_with_logits(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_decision(
    run: Run,
    target: Path,
    draft: Path,
    features: str,
    data: str | None = None,
    prompts: int = 400,
    epochs: int = 6,
) -> None:
    """Learn from four fifths of the questions, say how good it is on the others, save.

    ``prompts`` is how many there are at most. ``data`` is "mini", "self" (the target asks itself)
    or a file of dialogues, by default what the draft has learnt from.
    """
    refuse_other_than_file(run.out)
    if prompts < 5 or epochs < 1:
        raise ValueError(f"expected 5 prompts, 1 epoch or more; got {prompts} and {epochs}")
    refuse_whole_target(target, draft, exits=None)
    data = data or read_data_of(draft)
    check_data(data)
    model = load_model(target, run.device)
    drafter = model
    if not is_same_folder(draft, target):
        drafter = load_model(draft, run.device, layers=read_drafting(draft).exits[-1])
    questions, counts = find_questions(target, model, data, prompts, run.seed)
    if len(questions) < 5:
        raise ValueError(f"{data} gives {len(questions)} questions; expected 5 or more; {counts}")
    torch.manual_seed(run.seed)
    decision = Decision(features, drafter.config.hidden_size, THRESHOLD, fingerprint(drafter))
    decision.to(run.device)
    kept_out = len(questions) // 5
    inputs, labels = collect(decision, model, drafter, questions[kept_out:])
    fit_decision(decision, inputs, labels, epochs, run.seed)
    learnt = len(labels)
    inputs, labels = collect(decision, model, drafter, questions[:kept_out])
    with torch.inference_mode():
        right = (decision(inputs) > 0.5) == (labels > 0.5)
    print(
        f"kept out: right about {right.float().mean():.1%} of {len(right)} drafted tokens; always "
        f"going on would be right about {(labels > 0.5).float().mean():.1%}"
    )
    save_decision(decision, run.out)
    tell(
        f"{run.out}: a decision model for {draft}; it learnt from {data}, {epochs} times {learnt} "
        f"drafted tokens for {len(questions) - kept_out} questions, {kept_out} more were kept out; "
        f"{counts}"
    )


def read_data_of(draft: Path) -> str:
    """The data that a draft has learnt from, by its config.json; "mini" if that says nothing."""
    return str(read_json(draft / "config.json", missing={}).get("learnt_from", "mini"))


def find_questions(
    target: Path, model: Llama, data: str, count: int, seed: int
) -> tuple[list[list[int]], Counts]:
    """Prompts for ``model``, which is in the folder ``target``: at most ``count`` of ``data``."""
    tokenizer = Tokenizer(target, model.config.vocab_size)
    seed += 2  # not the questions that the draft has learnt from, unless they are those of a file
    if data == "self":
        with TemporaryDirectory() as folder:
            return ask(find_ways_to_ask(tokenizer), model, count, seed, Path(folder))
    counts = Counts(tokenizer.prompt_format.name)
    encode = partial(encode_question, tokenizer, model.config.max_position_embeddings)
    questions = islice(encode_dialogues(data, seed, encode, counts), count)
    return list(questions), counts


def encode_question(tokenizer: Tokenizer, context_size: int, dialogue: list[Message]) -> list[int]:
    """The ids of a dialogue up to its first question; ValueError if no draft has room after it."""
    asked = next(number for number, each in enumerate(dialogue, 1) if each["role"] == "user")
    prompt = tokenizer.encode_prompt(dialogue[:asked])
    if not 0 < len(prompt) < context_size - DRAFT_LENGTH:
        raise ValueError(f"a question does not fit into a context of {context_size} tokens")
    return prompt
