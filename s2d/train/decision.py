"""Training a decision model (arXiv 2409.10644): draft, let the target verify, learn from that."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..checkpoint.files import taken
from ..checkpoint.notices import progress, tell
from ..generation import start
from ..mcsd.decision import Decision, fingerprint, save_decision, with_decision
from ..pair.loading import Pair, load_pair
from ..stats import Step
from ..tree import Node
from .data import read_dialogues, read_records
from .fit import Run

LEARNING_RATE = {"hidden": 1e-3, "stats": 5e-3}  # at its peak, by features
THRESHOLD = 0.4  # drafting stops where no path is as likely to be accepted as this


def collect(decision: Decision, pair: Pair, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Features (M, F) and acceptance probabilities (M,) of every token drafted at T = 0 and 1.

    Features are what ``decision`` is asked about, once for each token of a chain. No chain ends
    early, as ``stop`` is 0.
    """
    features = []
    labels: list[float] = []
    asked = []  # about the exits that were asked for a token
    hook = decision.register_forward_hook(lambda _, inputs, answers: asked.append(inputs[0]))

    class Noting(with_decision(decision)):
        def choose_exit(self, *given: Any) -> tuple[list[Node], float]:
            found = super().choose_exit(*given)
            features.append(asked[-1])  # of the exit that was chosen
            asked.clear()
            return found

    chains = dict(draft_length=10, rule="rejection", drafter=Noting, stop=0.0)
    for temperature in (0.0, 1.0):
        for seed, prompt in enumerate(progress(prompts, "answers to draft for", len(prompts))):
            how = chains | dict(temperature=temperature, seed=seed)
            for step in start(pair.target, prompt, pair.draft, **how):
                labels += acceptance_of(step, temperature)
    hook.remove()
    return torch.cat(features), torch.tensor(labels, device=pair.draft.device)


def acceptance_of(step: Step, temperature: float) -> list[float]:
    """Acceptance probabilities of a step's chain: min(1, p / q), one-hot at T = 0."""
    found = []
    for logits, node in zip(step.logits.float(), step.tree.nodes[1:]):  # what decides about a node
        if temperature == 0:
            found.append(float(logits.argmax() == node.token))
        else:
            ratio = logits.softmax(dim=-1)[node.token] / node.q[node.token]
            found.append(min(1.0, ratio.item()))
    return found


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
    run: Run, target: str, draft: str, features: str, data: str, prompts: int, epochs: int
) -> None:
    """Learn from the answers to the first ``prompts`` questions of ``data``, and save."""
    with taken(run.out):
        # Not the questions that the draft has learnt from, unless they are those of a file.
        records = read_records(data, run.seed + 2)
        pair = load_pair(target, draft, device=run.device)
        room = pair.target.config.max_position_embeddings - 16  # for a draft
        firsts = (rounds[0][0] for rounds in read_dialogues(data, records, pair.tokenizer))
        questions = list(islice((each for each in firsts if len(each) < room), prompts))
        firsts.close()  # now it tells what was passed over
        if not questions:
            raise ValueError(f"{data} has no question that is short enough for {target}")
        torch.manual_seed(run.seed)
        size = pair.draft.config.hidden_size
        name = fingerprint(pair.draft.model.norm.weight)
        decision = Decision(features, size, THRESHOLD, name).to(pair.draft.device)
        inputs, labels = collect(decision, pair, questions)
        fit_decision(decision, inputs, labels, epochs, run.seed)
        save_decision(decision, run.out)
    tell(f"{run.out}: it learnt from {data}, {epochs} times {len(labels)} drafted tokens")
