"""What breaks losslessness: rules with one mistake each, and how far they are from the target.

``python -m s2d.lesson.lossless`` prints a table. No model runs: a target p and a draft q are small
tables of distributions, and whatever a step may draw, accept and reject is enumerated. So the
distances are exact. Only noise is integrated, over POINTS points. ``measure`` measures a rule of
your own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..draft import SortedDraft
from ..options import Options, Plan
from ..rules import Prediction, Rejection, Rule, SharedNoise, best_children, residual, without
from ..sampling import Draws, warp
from ..tree import FixedShape, Proposal, Tree

V = 3  # tokens of the vocabulary
TEMPERATURE = 0.6
SHAPES = {"chain 1,1": (1, 1), "tree 2,1": (2, 1)}
POINTS = 2048  # at which noise is integrated: that is good to two digits
Nodes = list[int]
Tested = tuple[int | None, Tensor]


class EveryOutcome(Draws):
    """Draws that replay a list of choices, and know how probable they are.

    At a fork that is new, the first choice is taken, and the others go to ``untried``.
    ``numbers`` are what ``uniform`` returns.
    """

    def __init__(self, choices: Sequence[int], numbers: Sequence[float] = ()) -> None:
        self.choices = list(choices)
        self.used = 0
        self.probability = 1.0
        self.untried: list[list[int]] = []
        self.numbers = iter(numbers)
        self.is_exact = True  # no number was asked for

    def uniform(self, count: int) -> Tensor:
        self.is_exact = False
        return torch.tensor([next(self.numbers) for _ in range(count)], dtype=torch.float64)

    def choose(self, probs: list[float]) -> int:
        """The next choice among outcomes with these probabilities."""
        if self.used == len(self.choices):
            first, *others = [choice for choice, prob in enumerate(probs) if prob > 1e-200]
            self.untried += [[*self.choices, other] for other in others]
            self.choices.append(first)
        choice = self.choices[self.used]
        self.used += 1
        self.probability *= probs[choice]
        return choice

    def flip(self, probability: float) -> bool:
        heads = max(0.0, min(1.0, probability))
        return self.choose([1.0 - heads, heads]) == 1

    def draw(self, probs: Tensor) -> Tensor:
        return torch.tensor([self.choose((row / row.sum()).tolist()) for row in probs])


def every_outcome(
    step: Callable[[EveryOutcome], list[int]], numbers: Sequence[float] = ()
) -> Iterator[tuple[list[int], EveryOutcome]]:
    """Yield what ``step`` emits, and the draws that led to it, for all that it may draw."""
    waiting: list[list[int]] = [[]]
    while waiting:
        draws = EveryOutcome(waiting.pop(), numbers)
        yield step(draws), draws
        waiting += draws.untried


@cache
def logits_after(path: tuple[int, ...], seed: int) -> Tensor:
    """The logits (V,) of a small made-up model after some tokens."""
    number = sum((token + 1) * 10**place for place, token in enumerate(path))
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return 1.5 * torch.randn(V, dtype=torch.float64, generator=generator)


def target_after(path: tuple[int, ...]) -> Tensor:
    """The target's logits (V,) after a path."""
    return logits_after(path, seed=2)


class MadeUpExit:
    """The only exit of a draft that is half right."""

    exit_layer = 1
    max_positions = 1e9

    def start(self, capacity: int) -> None:
        """It needs no cache."""

    def predict(self, tree: Tree, nodes: list[int]) -> Prediction:
        paths = [tuple(tree.path(node)) for node in nodes]
        rows = [(target_after(path) + logits_after(path, seed=5)) / 2 for path in paths]
        return Prediction(torch.stack(rows), confidence=1.0)

    def keep(self, tree: Tree, accepted: list[int]) -> None:
        """It keeps nothing."""


class Measured(NamedTuple):
    distance: float  # total variation distance of the first two tokens from the target's own
    accepted: float  # mean number of accepted tokens in a step
    is_exact: bool  # enumerated, and not integrated


def measure(make_rule: Callable[[Draws], Rule], widths: tuple[int, ...]) -> Measured:
    """What a step emits under a rule, in a tree with these ``widths``.

    ``make_rule(draws)`` makes the rule. All of its random choices have to come from ``draws``, by
    ``draw``, ``flip``, ``candidates`` and ``uniform``. ``distribution`` below says which p and q
    the rule is measured with.
    """

    def step(draws: EveryOutcome) -> list[int]:
        rule = make_rule(draws)
        drafter = SortedDraft(V, [MadeUpExit()], plan)
        tree = drafter.grow(Tree([0]), len(widths), rule)
        paths = [tuple(tree.path(node)) for node in range(len(tree.tokens))]
        accepted, bonus = rule.verify(tree, torch.stack([target_after(path) for path in paths]))
        return [tree.tokens[node] for node in accepted] + [bonus]

    plan = Plan(Options(), "mcsd", (), (0.0,), FixedShape(widths), stop=0.0)
    found = torch.zeros(V, V, dtype=torch.float64)
    mean = 0.0
    is_exact = True
    points = SobolEngine(V * (len(widths) + 1), scramble=True, seed=0).draw(POINTS).tolist()
    for point in points:
        for tokens, draws in every_outcome(step, point):
            mean += draws.probability * (len(tokens) - 1)
            is_exact = draws.is_exact
            if len(tokens) > 1:
                found[tokens[0], tokens[1]] += draws.probability
            else:
                found[tokens[0]] += draws.probability * distribution(target_after(tuple(tokens)))
        if is_exact:  # it does not depend on the point
            points = [point]
            break
    first = distribution(target_after(()))
    second = torch.stack([distribution(target_after((token,))) for token in range(V)])
    distance = (found / len(points) - first[:, None] * second).abs().sum().item() / 2
    return Measured(distance, mean / len(points), is_exact)


def distribution(logits: Tensor) -> Tensor:
    """Logits (..., V) -> p or q (..., V)."""
    return warp(logits, TEMPERATURE)


class DrawnNoise:
    """Noise from uniform numbers: a row for each position, or ``one_row`` for all."""

    def __init__(self, draws: Draws, one_row: bool = False) -> None:
        self.row = cache(lambda position: -torch.log(draws.uniform(V).clamp(1e-12, 1 - 1e-12)))
        self.one_row = one_row

    def at(self, positions: list[int]) -> Tensor:
        return torch.stack([self.row(0 if self.one_row else each) for each in positions])


# Rules with one mistake each. A docstring says what is wrong, and where that was seen: in a paper,
# or in a project's public tracker.


class BestAsDrawn(Rejection):
    """the best token of q is tested as if it were drawn (jaymody/speculative-sampling 3)"""

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        q = self.distribution(logits)
        return best_children(q, count)._replace(q=q.unbind())


class BonusFromP(Rejection):
    """after a rejection, the bonus token is drawn from all of p (asked in NJUNLP/MCSD 5)"""

    def test_children(self, children: Nodes, tokens: list[int], p: Tensor, q: Tensor) -> Tested:
        return super().test_children(children, tokens, p, q)[0], p


class OtherTemperature(Rejection):
    """drawn from q at the temperature, tested against q at temperature 1 (z-lab/dflash 74)"""

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        proposal = super().propose(tree, nodes, logits, count)
        return proposal._replace(q=warp(logits, 1.0).unbind())


class OtherTopP(Rejection):
    """drawn from q with top-p, tested against q without (like transformers 47932)"""

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        kept = warp(logits, TEMPERATURE, top_p=0.6).log() * TEMPERATURE
        proposal = super().propose(tree, nodes, kept, count)
        return proposal._replace(q=self.distribution(logits).unbind())


class KeptIfLikely(Rejection):
    """a token that was drawn, but is improbable, is not sent"""

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        tokens, probs, q = super().propose(tree, nodes, logits, count)
        kept = [[token for token, prob in zip(*row) if prob > 0.3] for row in zip(tokens, probs)]
        return Proposal(kept, [[prob for prob in row if prob > 0.3] for row in probs], q)


class ExitAfterDraw(Rejection):
    """the exit is chosen after the draw: an improbable token is drawn anew at the next exit"""

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        first = super().propose(tree, nodes, logits, count)
        if min(row[0] for row in first.probs) > 0.3:
            return first
        return super().propose(tree, nodes, 0.5 * logits, count)


class WithReplacement(Rejection):
    """children are drawn without replacement, and tested as if with it (compare EAGLE 20)"""

    def test_children(self, children: Nodes, tokens: list[int], p: Tensor, q: Tensor) -> Tested:
        for child in children:
            if self.draws.flip((p[tokens[child]] / q[tokens[child]]).item()):
                return child, p
            p = residual(p, q)
        return None, p


class AgainstP(Rejection):
    """each child is tested against p, and not against what is left of it"""

    def test_children(self, children: Nodes, tokens: list[int], p: Tensor, q: Tensor) -> Tested:
        left = p
        for child in children:
            if self.draws.flip((p[tokens[child]] / q[tokens[child]]).item()):
                return child, p
            left = residual(left, q)
            q = without(q, tokens[child])
        return None, left


class BestRatioFirst(Rejection):
    """of several children, the one with the largest p / q is tested first"""

    def test_children(self, children: Nodes, tokens: list[int], p: Tensor, q: Tensor) -> Tested:
        ranked = sorted(children, key=lambda child: -(p / q)[tokens[child]].item())
        return super().test_children(ranked, tokens, p, q)


class SharedNumber(Rejection):
    """one random number draws a token from q and tests it (vllm 47386)"""

    def test_children(self, children: Nodes, tokens: list[int], p: Tensor, q: Tensor) -> Tested:
        for child in children:
            token = tokens[child]
            # The number that drew the token lies between two sums of q, and passes below p / q.
            passes = (p[token] / q[token] - q[:token].sum()) / q[token]
            if self.draws.flip(passes.item()):
                return child, p
            p = residual(p, q)
            q = without(q, token)
        return None, p


class Typical(Rejection):
    """typical acceptance: a token is accepted if p is above a threshold (2401.10774)"""

    def test_children(self, children: Nodes, tokens: list[int], p: Tensor, q: Tensor) -> Tested:
        threshold = min(0.3, 0.09**0.5 * torch.exp(-torch.special.entr(p).sum()).item())
        likely = [child for child in children if p[tokens[child]] > threshold]
        return (likely or [None])[0], p


def shared_noise(draws: Draws, one_row: bool = False) -> Rule:
    return SharedNoise(distribution, DrawnNoise(draws, one_row))


RIGHT: dict[str, Callable[[Draws], Rule]] = {
    "rejection sampling (2302.01318)": partial(Rejection, distribution),
    "children are chosen, and tested by p alone (EAGLE 183)": partial(
        Rejection, distribution, chosen=True
    ),
    "shared noise (2408.07978)": shared_noise,
}
MISTAKES = [BestAsDrawn, BonusFromP, OtherTemperature, OtherTopP, KeptIfLikely, ExitAfterDraw]
MISTAKES += [WithReplacement, AgainstP, BestRatioFirst, SharedNumber, Typical]
WRONG = {kind.__doc__: partial(kind, distribution) for kind in MISTAKES}
WRONG["one row of noise for all positions"] = partial(shared_noise, one_row=True)


def show(measured: Measured) -> str:
    """A cell of the table."""
    distance = f"{measured.distance:.3f}" if measured.distance > 1e-12 else "0"
    if not measured.is_exact:
        distance = f"{measured.distance:.2f} ±0.01"
    return f"{distance} / {measured.accepted:.2f}"


def main() -> None:
    """Print the table."""
    print("Distance of the first two tokens from the target's own / accepted tokens in a step.\n")
    print(f"| rule | {' | '.join(SHAPES)} |\n|---|---|---|")
    for title, rules in (("right", RIGHT), ("wrong", WRONG)):
        for name, make_rule in rules.items():
            cells = [show(measure(make_rule, widths)) for widths in SHAPES.values()]
            print(f"| {title}: {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
