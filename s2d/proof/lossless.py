"""What breaks losslessness: rules with one mistake each, and how far they are from the target.

``python -m s2d.proof`` prints the table. Target and draft are small tables of distributions, and
whatever a step may draw, accept and reject is enumerated. ``measure`` measures a rule of your own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

from torch import Tensor

from ..draft import SortedDraft
from ..generation import decide, make_rule
from ..options import make_shape
from ..rules import Prediction, Proposal, Rejection, Rule, SharedNoise, best_children, residual
from ..sampling import Distribution, Draws
from ..tree import Node, Shape, Tree
from .forks import law
from .models import TableModel, text_law
from .promises import checked

TREES = {"chain 1,1": (1, 1), "tree 2,1": (2, 1)}
TARGET = TableModel(seed=54)
DRAFT = TableModel(seed=104, mixed_with=TARGET)


class Measured(NamedTuple):
    distance: float  # total variation distance of a step's text from the target's own
    accepted: float  # mean number of accepted tokens in a step
    enumerated: bool  # and not integrated, so that the distance is exact


def measure(
    rule: str | Callable[..., Rule],
    tree: Sequence[int] | Shape,
    temperature: float = 0.6,
    target: TableModel = TARGET,
    draft: TableModel = DRAFT,
    points: int = 1024,
) -> Measured:
    """What a step emits under a ``rule`` in a ``tree``: widths by level, or a Shape.

    Both are given as to ``generate``, and are ``checked``. All levels and the bonus token are
    compared. Where a step emits fewer tokens, the target's own follow.
    """
    options = decide(None, tree=tree, stop=0.0, rule=rule, temperature=temperature)

    def step(draws: Draws) -> list[int]:
        own_rule = checked(make_rule(rule, options.distribution, draws))
        drafted = Tree([0], checked(make_shape(options.tree)))
        SortedDraft([draft], options, eos=()).grow(drafted, drafted.shape.depth, own_rule)
        accepted, bonus = own_rule.verify(drafted, target.predict(drafted, drafted.nodes).logits)
        return [*(node.token for node in accepted), bonus]

    def own(text: Sequence[int]) -> Tensor:
        return options.distribution(target.logits_after(text))[0]

    emitted = law(step, points)
    length = make_shape(options.tree).depth + 1
    distance = text_law(own, length, emitted).distance(text_law(own, length))
    accepted = sum(prob * (len(tokens) - 1) for tokens, prob in emitted.probs.items())
    return Measured(distance, accepted, emitted.enumerated)


# What is wrong, and where that was seen: in a paper, or in a project's public tracker.
MISTAKES = {
    "best": "the best token of q is tested as if it were drawn (jaymody/speculative-sampling 3)",
    "exit": "the exit is chosen after the draw: an improbable token is drawn anew at the next exit",
    "not sent": "a token that was drawn, but is improbable, is not sent",
    "one number": "one random number draws a token from q and tests it (vllm 47386)",
    "T = 1": "drawn from q at the temperature, tested against q at temperature 1 (z-lab/dflash 74)",
    "bonus": "after a rejection, the bonus token is drawn from all of p (asked in NJUNLP/MCSD 5)",
    "against p": "each child is tested against p, and not against what is left of it",
    "q kept": "children are drawn without replacement, and tested as if with it (compare EAGLE 20)",
}


class Mistaken(Rejection):
    """Rejection sampling, written out, with one of the MISTAKES in its place, or with "none"."""

    def __init__(self, mistake: str, distribution: Distribution, draws: Draws) -> None:
        super().__init__(distribution, draws)
        self.mistake = mistake

    def propose(self, tree: Tree, nodes: list[Node], said: Prediction, width: int) -> Proposal:
        tokens, estimates, q = super().propose(tree, nodes, said, width)
        if self.mistake == "best":
            estimates, tokens = q.topk(width)
        if self.mistake == "exit" and tree.depth == 0 and estimates[0, 0] < 0.3:
            later = said._replace(logits=said.logits / 2)
            tokens, estimates, q = super().propose(tree, nodes, later, width)
        if self.mistake == "not sent":
            estimates = estimates.where(estimates > 0.3, 0.0)
        if self.mistake == "T = 1":
            q = Distribution(temperature=1.0)(said.logits)
        return Proposal(tokens, estimates, q)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[Node], int]:
        node = tree.root
        while True:
            p = left = self.distribution(logits[tree.nodes.index(node)])  # (V,)
            children = tree.children(node)
            q = children[0].q if children else None
            for child in children:
                chance = left[child.token] / q[child.token]
                if self.mistake == "against p":
                    chance = p[child.token] / q[child.token]
                if self.mistake == "one number":
                    # The number that drew the token is between two sums of q; it passes below p/q.
                    chance = (chance - q[: child.token].sum()) / q[child.token]
                if self.draws.flip(chance.item()):
                    node = child
                    break
                if self.mistake != "bonus":
                    left = residual(left, q)
                if self.mistake != "q kept":
                    q = q.clone()
                    q[child.token] = 0.0
                    q /= q.sum()
            else:  # all children are rejected, or there are none
                return list(node.path[1:]), self.draws.draw(left[None]).item()


class Chosen(Rejection):
    """Rejection sampling with chosen children, as in a growing tree."""

    def propose(self, tree: Tree, nodes: list[Node], said: Prediction, width: int) -> Proposal:
        return best_children(self.distribution(said.logits), width)


def one_row(distribution: Distribution, draws: Draws) -> Rule:
    """Shared noise that is one row for all positions."""
    row = lambda positions, like: draws.noise([0] * len(positions), like)  # noqa: E731
    return SharedNoise(distribution, SimpleNamespace(noise=row))


RULES: dict[str, Callable[..., Rule]] = {
    "right: rejection sampling (2302.01318)": Rejection,
    "right: chosen children, tested by p alone (EAGLE 183)": Chosen,
    "right: shared noise (2408.07978)": SharedNoise,
    **{f"wrong: {title}": partial(Mistaken, mistake) for mistake, title in MISTAKES.items()},
    "wrong: one row of noise for all positions": one_row,
}


def show(measured: Measured) -> str:
    """A cell of the table."""
    distance = "0" if measured.distance < 1e-12 else f"{measured.distance:.3f}"
    spread = "" if measured.enumerated else " ±0.02"
    return f"{distance}{spread} / {measured.accepted:.2f}"


def print_table() -> None:
    """The distance and the accepted tokens of all RULES."""
    print("Distance of a step's text from the target's own / accepted tokens in a step.\n")
    print(f"| rule | {' | '.join(TREES)} |\n|---|---|---|")
    for name, rule in RULES.items():
        cells = [show(measure(rule, tree)) for tree in TREES.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
