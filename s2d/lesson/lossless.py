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

from ..rules import Rejection, Rule, SharedNoise, best_children, residual, without
from ..sampling import Draws, warp
from ..tree import Proposal, Tree

V = 3  # tokens of the vocabulary
TEMPERATURE = 0.6
SHAPES = {"chain 1,1": (1, 1), "tree 2,1": (2, 1)}
POINTS = 2048  # at which noise is integrated: that is good to two digits
TARGET = 2  # seeds of two made-up models
OTHER = 5  # the draft is half way between them


class EveryOutcome(Draws):
    """Draws that replay a list of choices, and know how probable they are.

    At a fork that is new, the first choice is taken, and the others go to ``untried``. The numbers
    of ``uniform`` are those of one of ``points``, which are all equally probable.
    """

    def __init__(self, choices: list[int], points: Sequence[list[float]]) -> None:
        self.choices = choices
        self.used = 0
        self.probability = 1.0
        self.untried: list[list[int]] = []
        self.points = points
        self.numbers: Iterator[float] | None = None  # None until a number is asked for

    def uniform(self, count: int) -> Tensor:
        if self.numbers is None:
            chances = [1 / len(self.points)] * len(self.points)
            self.numbers = iter(self.points[self.choose(chances)])
        numbers = [next(self.numbers) for _ in range(count)]
        return torch.tensor(numbers, dtype=torch.float64)

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
    step: Callable[[EveryOutcome], list[int]], points: Sequence[list[float]] = ()
) -> Iterator[tuple[list[int], EveryOutcome]]:
    """Yield what ``step`` emits, and the draws that led to it, for all that it may draw."""
    waiting: list[list[int]] = [[]]
    while waiting:
        draws = EveryOutcome(waiting.pop(), points)
        yield step(draws), draws
        waiting += draws.untried


@cache
def logits_after(paths: tuple[tuple[int, ...], ...], seed: int) -> Tensor:
    """Logits (R, V) of a small made-up model after each of R paths."""
    rows = []
    for path in paths:
        number = sum((token + 1) * 10**place for place, token in enumerate(path))
        generator = torch.Generator().manual_seed(1000 * seed + number)
        rows.append(1.5 * torch.randn(V, dtype=torch.float64, generator=generator))
    return torch.stack(rows)


def distribution(logits: Tensor) -> Tensor:
    """Logits (..., V) -> p or q (..., V)."""
    return warp(logits, TEMPERATURE)


class Measured(NamedTuple):
    distance: float  # total variation distance of the first two tokens from the target's own
    accepted: float  # mean number of accepted tokens in a step
    is_exact: bool  # enumerated, and not integrated


def measure(make_rule: Callable[[Draws], Rule], widths: tuple[int, ...]) -> Measured:
    """What a step emits under a rule, in a tree with these ``widths``.

    ``make_rule(draws)`` makes the rule. All of its random choices have to come from ``draws``, by
    ``draw``, ``flip``, ``candidates`` and ``uniform``, which has V numbers for each level and for
    the bonus token. ``distribution`` above makes p and q. The first two tokens are compared: of a
    bonus token after an accepted path, only (1,) and (2,) tell anything.
    """

    def step(draws: EveryOutcome) -> list[int]:
        rule = make_rule(draws)
        tree = Tree([0])
        for width in widths:
            nodes = tree.leaves(least=0.0)
            if not nodes:
                break
            paths = tuple(tuple(tree.path(node)) for node in nodes)
            logits = (logits_after(paths, TARGET) + logits_after(paths, OTHER)) / 2
            tree.add_level(nodes, rule.propose(tree, nodes, logits, width), exit_layer=1)
        paths = tuple(tuple(tree.path(node)) for node in range(len(tree.tokens)))
        accepted, bonus = rule.verify(tree, logits_after(paths, TARGET))
        return [tree.tokens[node] for node in accepted] + [bonus]

    first = distribution(logits_after(((),), TARGET))[0]  # (V,)
    second = distribution(logits_after(((0,), (1,), (2,)), TARGET))  # (V, V)
    excess = -first[:, None] * second  # (V, V): what is emitted, less the target's own
    accepted = 0.0
    is_exact = True
    engine = SobolEngine(V * (len(widths) + 1), scramble=True, seed=0)
    for tokens, draws in every_outcome(step, engine.draw(POINTS).tolist()):
        if len(tokens) > 1:
            excess[tokens[0], tokens[1]] += draws.probability
        else:  # the next step begins with a draw from p
            excess[tokens[0]] += draws.probability * second[tokens[0]]
        accepted += draws.probability * (len(tokens) - 1)
        is_exact = is_exact and draws.numbers is None
    return Measured(excess.abs().sum().item() / 2, accepted, is_exact)


class DrawnNoise:
    """Noise from uniform numbers: a row for each position, or ``one_row`` for all."""

    def __init__(self, draws: Draws, one_row: bool) -> None:
        self.row = cache(lambda position: -torch.log(draws.uniform(V).clamp(1e-12, 1 - 1e-12)))
        self.one_row = one_row

    def at(self, positions: list[int]) -> Tensor:
        return torch.stack([self.row(0 if self.one_row else each) for each in positions])


def shared_noise(draws: Draws, one_row: bool = False) -> Rule:
    return SharedNoise(distribution, DrawnNoise(draws, one_row))


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

    def __init__(self, mistake: str, draws: Draws) -> None:
        super().__init__(distribution, draws)
        self.mistake = mistake

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        q = distribution(logits)
        if self.mistake == "best":
            return best_children(q, count)._replace(q=q.unbind())
        if self.mistake == "top-p":
            kept = warp(logits, TEMPERATURE, top_p=0.6).log() * TEMPERATURE
            return super().propose(tree, nodes, kept, count)._replace(q=q.unbind())
        drawn = super().propose(tree, nodes, logits, count)
        if self.mistake == "T = 1":
            return drawn._replace(q=warp(logits, 1.0).unbind())
        if self.mistake == "exit" and min(row[0] for row in drawn.probs) <= 0.3:
            return super().propose(tree, nodes, 0.5 * logits, count)
        if self.mistake == "not sent":
            pairs = [list(zip(*row)) for row in zip(drawn.tokens, drawn.probs)]
            tokens = [[token for token, prob in row if prob > 0.3] for row in pairs]
            probs = [[prob for prob in row if prob > 0.3] for row in drawn.probs]
            return Proposal(tokens, probs, drawn.q)
        return drawn

    def test_children(
        self, children: list[int], tokens: list[int], p: Tensor, q: Tensor
    ) -> tuple[int | None, Tensor]:
        """``Rejection.test_children``, written out, with the mistakes in their places."""
        if self.mistake == "typical":
            threshold = 0.3 * torch.exp(-torch.special.entr(p).sum())
            likely = [child for child in children if p[tokens[child]] > threshold]
            return (likely or [None])[0], p
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
            if self.draws.flip(chance.item()):
                return child, left
            left = residual(left, q)
            if self.mistake != "q kept":
                q = without(q, token)
        if self.mistake == "bonus":
            left = p
        return None, left


RULES: dict[str, Callable[[Draws], Rule]] = {
    "right: rejection sampling (2302.01318)": partial(Rejection, distribution),
    "right: children are chosen, and tested by p alone (EAGLE 183)": partial(
        Rejection, distribution, chosen=True
    ),
    "right: shared noise (2408.07978)": shared_noise,
}
for mistake, title in MISTAKES.items():
    RULES[f"wrong: {title}"] = partial(Mistaken, mistake)
RULES["wrong: one row of noise for all positions"] = partial(shared_noise, one_row=True)


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
    for name, make_rule in RULES.items():
        cells = [show(measure(make_rule, widths)) for widths in SHAPES.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
