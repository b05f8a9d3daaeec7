"""What breaks losslessness: rules with one mistake each, and how far they are from the target.

``python -m s2d.proof`` prints the table. A target and a draft are small tables of distributions,
and whatever a step may draw, accept and reject is enumerated. ``measure`` measures a rule, also
one of your own.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..checked import CheckedShape
from ..draft import SortedDraft
from ..generation import make_rule
from ..options import decide
from ..rules import (
    Distribution,
    Prediction,
    Rejection,
    RuleMaker,
    SharedNoise,
    best_children,
    residual,
    without,
)
from ..sampling import Draws, warp
from ..stats import Step
from ..tree import Proposal, Shape, Tree
from .law import Law, law
from .models import TableModel, text_law

SHAPES = {"chain 1,1": (1, 1), "tree 2,1": (2, 1)}
TARGET = TableModel(2)
DRAFT = TableModel(5, mixed_with=TARGET)


class Measured(NamedTuple):
    """How a step's text differs from the target's own."""

    distance: float  # total variation distance, of all levels and the bonus token
    accepted: float  # mean number of accepted tokens in a step
    enumerated: bool  # and not integrated, so that the distance is exact


class TableExit:
    """An exit that predicts by a TableModel."""

    exit_layer = 1
    max_positions = math.inf

    def __init__(self, model: TableModel) -> None:
        self.model = model

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
        logits = self.model.logits_after(*(tree.path(node) for node in nodes))
        return Prediction(logits, confidence=1.0)

    def keep(self, step: Step) -> None:
        pass


def measure(
    rule: str | RuleMaker,
    tree: Sequence[int] | Shape,
    temperature: float = 0.6,
    target: TableModel = TARGET,
    draft: TableModel = DRAFT,
    points: int = 512,
) -> Measured:
    """What a step emits under a rule, as ``generate`` takes it, and a tree, as it takes it.

    All levels and the bonus token are compared. Where a step emits fewer tokens, the target's own
    follow. Raises ValueError for what ``generate`` would refuse.
    """
    options = decide(None, exits=[TableExit], tree=tree, rule=rule, temperature=temperature)
    shape = CheckedShape(options.shape)

    def step(draws: Draws) -> list[int]:
        used = make_rule(options, draws)
        drafter = SortedDraft([TableExit(draft)], (), shape, stop=0.0, eos_token_ids=())
        tree = drafter.grow(Tree.root([0]), shape.depth, used)
        paths = [tree.path(node) for node in range(len(tree.tokens))]
        accepted, bonus = used.verify(tree, target.logits_after(*paths))
        return [tree.tokens[node] for node in accepted] + [bonus]

    emitted = law(step, points)
    length = shape.depth + 1
    own = partial(target_law, target, options.distribution, length)
    accepted = sum(prob * (len(tokens) - 1) for tokens, prob in emitted.probs.items())
    return Measured(own(emitted).distance(own()), accepted, emitted.enumerated)


def target_law(
    target: TableModel, distribution: Distribution, length: int, begun: Law | None = None
) -> Law:
    return text_law(lambda text: distribution(target.logits_after(text))[0], length, begun)


# What is wrong, and where that was seen: in a paper, or in a project's public tracker.
MISTAKES = {
    "best": "the best token of q is tested as if it were drawn (jaymody/speculative-sampling 3)",
    "bonus": "after a rejection, the bonus token is drawn from all of p (asked in NJUNLP/MCSD 5)",
    "T = 1": "drawn from q at the temperature, tested against q at temperature 1 (z-lab/dflash 74)",
    "top-p": "drawn from q with top-p, tested against q without (like transformers 47932)",
    "not sent": "a token that was drawn, but is improbable, is not sent",
    "exit": "the exit is chosen after the draw: an improbable token is drawn anew at the next exit",
    "q kept": "children are drawn without replacement, and tested as if with it (compare EAGLE 20)",
    "against p": "each child is tested against p, and not against what is left of it",
    "order": "of several children, the one with the largest p / q is tested first",
    "one number": "one random number draws a token from q and tests it (vllm 47386)",
    "typical": "typical acceptance: a token is accepted if p is above a threshold (2401.10774)",
}


class Mistaken(Rejection):
    """Rejection sampling with one of the MISTAKES; with none, if ``mistake`` is another word."""

    def __init__(self, mistake: str, distribution: Distribution, draws: Draws) -> None:
        super().__init__(distribution, draws)
        self.mistake = mistake

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        logits = prediction.logits
        q = self.distribution(logits)
        drawn = super().propose(tree, nodes, prediction, widths)
        if self.mistake == "best":
            return best_children(q, widths)._replace(q=q.unbind())
        if self.mistake == "T = 1":
            return drawn._replace(q=warp(logits, 1.0).unbind())
        if self.mistake == "top-p":
            right = Rejection(partial(warp, temperature=1.0, top_p=0.6), self.draws)
            again = right.propose(tree, nodes, Prediction(q.log(), 1.0), widths)
            return again._replace(q=q.unbind())
        if self.mistake == "exit" and min(row[0] for row in drawn.probs) <= 0.3:
            return super().propose(tree, nodes, Prediction(0.5 * logits, 1.0), widths)
        if self.mistake == "not sent":
            pairs = [list(zip(*row)) for row in zip(drawn.tokens, drawn.probs)]
            tokens = [[token for token, prob in row if prob > 0.3] for row in pairs]
            probs = [[prob for prob in row if prob > 0.3] for row in drawn.probs]
            return Proposal(tokens, probs, drawn.q)
        return drawn

    def test_children(
        self, children: list[int], tokens: Sequence[int], p: Tensor, q: Tensor
    ) -> tuple[int | None, Tensor]:
        """``Rejection.test_children``, written out, with the mistakes in their places."""
        if self.mistake == "order":
            children = sorted(children, key=lambda child: -(p / q)[tokens[child]].item())
        left = p
        for child in children:
            token = tokens[child]
            chance = left[token] / q[token]
            if self.mistake == "against p":
                chance = p[token] / q[token]
            if self.mistake == "one number":
                # The number that drew the token is between two sums of q, and passes below p / q.
                chance = (chance - q[:token].sum()) / q[token]
            if self.mistake == "typical":
                chance = (p[token] > 0.3 * torch.exp(-torch.special.entr(p).sum())).double()
            if self.draws.flip(chance.item()):
                return child, left
            left = residual(left, q)
            if self.mistake != "q kept":
                q = without(q, token)
        return None, p if self.mistake in ("bonus", "typical") else left


class BlockVerification(Rejection):
    """Block verification of a chain (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    The longest part is kept of which the test succeeds, also where a shorter part has failed. With
    ``forgets``, the weight of what is before a token is forgotten, which is wrong.
    """

    def __init__(self, distribution: Distribution, draws: Draws, forgets: bool = False) -> None:
        super().__init__(distribution, draws)
        self.forgets = forgets

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        return super().propose(tree, nodes, prediction, widths=[1] * len(nodes))

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        p = self.distribution(logits)  # (N+1, V)
        left = residual(p[0], tree.q[0])
        weight = torch.ones(())
        accepted = 0
        for node, token in enumerate(tree.tokens[1:], start=1):
            if self.forgets:
                weight = torch.ones(())
            weight = (weight * p[node - 1, token] / tree.q[node - 1][token]).clamp(max=1.0)
            rest, chance = p[node], weight
            if node in tree.q:  # there is another token after it
                rest = (weight * p[node] - tree.q[node]).clamp(min=0.0)
                chance = rest.sum() / (rest.sum() + 1 - weight)
            if self.draws.flip(chance.item()):
                accepted, left = node, rest
        return list(range(1, accepted + 1)), self.draws.draw(left[None]).item()


class OneRow(SharedNoise):
    """Noise that is one row for all positions."""

    def __init__(self, distribution: Distribution, draws: Draws) -> None:
        super().__init__(distribution, self)
        self.all = draws

    def noise(self, positions: list[int], like: Tensor) -> Tensor:
        return self.all.noise([0] * len(positions), like)


RULES: dict[str, RuleMaker] = {
    "right: rejection sampling (2302.01318)": Rejection,
    "right: children are chosen, and tested by p alone (EAGLE 183)": partial(
        Rejection, chosen=True
    ),
    "right: block verification (2403.10444)": BlockVerification,
    "right: shared noise (2408.07978)": SharedNoise,
    **{f"wrong: {title}": partial(Mistaken, mistake) for mistake, title in MISTAKES.items()},
    "wrong: block verification that forgets its weight": partial(BlockVerification, forgets=True),
    "wrong: one row of noise for all positions": OneRow,
}


def show(measured: Measured) -> str:
    """A cell of the table."""
    distance = f"{measured.distance:.3f}" if measured.distance > 1e-12 else "0"
    if not measured.enumerated:
        distance = f"{measured.distance:.2f} ±0.01"
    return f"{distance} / {measured.accepted:.2f}"


def print_table() -> None:
    """Print the distance and the accepted tokens of all RULES."""
    print("Distance of a step's text from the target's own / accepted tokens in a step.\n")
    print(f"| rule | {' | '.join(SHAPES)} |\n|---|---|---|")
    for name, rule in RULES.items():
        cells = [show(measure(rule, widths)) for widths in SHAPES.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
