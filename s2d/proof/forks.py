"""The exact law of a program that draws at random: each of its outcomes, with its probability.

``law`` runs a program again and again. Each random draw is a fork, and each run takes another
branch, until all of them are taken. The program is any code that draws by PyTorch or by
``random.random``: a verification function or a whole decoder, of this project or of another one.
It is not changed, and knows nothing of this.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.quasirandom import SobolEngine

from ..checkpoint.notices import progress
from ..sampling import Draws
from .unseen import other_names, states

LIMIT = 100_000  # runs
REPEATS = 32  # runs that are made twice, to see that nothing but the forks decides
POINTS = 2048  # at which numbers that are not only compared are integrated: good to two digits
NUMBERS = 256  # uniform numbers in a run, at most: their ids are exact in any float type
LEAST = 1e-12  # branches that are less probable are not taken: they come from rounding
Outcome = tuple[int, ...]
Program = Callable[[Draws], Iterable[int]]
Path = list[tuple[list[float], int]]  # by fork: the probabilities of its branches, the one taken


@dataclass(frozen=True)
class Law:
    """What a program may return, and how probable that is."""

    probs: dict[Outcome, float]
    enumerated: bool  # exact, up to rounding; otherwise integrated

    def distance(self, other: "Law") -> float:
        """The total variation distance: 0 for equal laws, 1 for laws without a common outcome."""
        return sum(abs(here - there) for _, here, there in self.worst(other)) / 2

    def worst(self, other: "Law", count: int | None = None) -> list[tuple[Outcome, float, float]]:
        """The ``count`` outcomes whose probabilities differ most, with both probabilities."""
        outcomes = sorted({*self.probs, *other.probs})
        rows = [(each, self.probs.get(each, 0.0), other.probs.get(each, 0.0)) for each in outcomes]
        return sorted(rows, key=lambda row: -abs(row[1] - row[2]))[:count]


def law(program: Program, points: int = POINTS, limit: int = LIMIT) -> Law:
    """The law of what ``program(draws)`` returns: tokens, or other whole numbers.

    A program of this project takes its random numbers from ``draws``, or from a ``Draws`` that it
    makes; others need not look at it. Where a uniform number is only compared, the comparison is a
    fork, and the law is exact. What is computed from a number, such as noise, is integrated over so
    many ``points``.

    Raises ValueError if there are more than ``limit`` outcomes, if the program draws in a way that
    is not seen, or if it keeps something from run to run.
    """
    forks = Forks(points)
    probs: dict[Outcome, float] = {}
    ends: list[tuple[Path, Outcome]] = []
    waiting: list[Path] = [[]]
    with other_names({random.random: forks.rand, Draws: partial(ForkedDraws, forks)}), forks:
        for _ in progress(range(limit), "runs of the program"):
            if not waiting:
                break
            outcome = forks.run(program, waiting.pop())
            probs[outcome] = probs.get(outcome, 0.0) + forks.probability
            ends.append((forks.path, outcome))
            waiting += forks.untried
        if waiting:
            raise ValueError(f"the program has more than {limit:,} outcomes")
        for number in range(REPEATS):
            path, outcome = ends[number * len(ends) // REPEATS]
            forks.check(forks.run(program, path) == outcome)
    return Law(probs, enumerated=not forks.integrated)


class Uniform(Tensor):
    """Random numbers in [0, 1) of which only intervals are known. The values are their ids."""


class Forks(TorchFunctionMode):
    """The runs of a program. In this context, random draws of PyTorch are forks."""

    def __init__(self, points: int) -> None:
        super().__init__()
        table = SobolEngine(NUMBERS, scramble=True, seed=0).draw(points)
        self.points = table.clamp(1e-6, 1 - 1e-6).tolist()
        self.equal = [1.0 / points] * points
        self.integrated = False
        self.states = states()

    def run(self, program: Program, path: Path) -> Outcome:
        """Take the branches of ``path``, and then always the first one.

        The paths with the other branches go to ``untried``.
        """
        self.path = list(path)
        self.used = 0  # forks so far
        self.probability = 1.0
        self.untried: list[Path] = []
        self.intervals: list[tuple[float, float]] = []  # of each uniform number, by its id
        self.point: list[float] | None = None  # None until a number itself is asked for
        self.seeds: set[int | None] = set()
        outcome = tuple(int(token) for token in program(ForkedDraws(self, seed=None)))
        for name, state in states().items():
            if state != self.states[name]:
                raise ValueError(f"the program draws by {name} in a way that is not seen, or seeds")
        self.check(self.used >= len(path))
        return outcome

    def check(self, same: bool) -> None:
        if not same:
            words = "it draws in a way that is not seen, or keeps something from run to run"
            raise ValueError(f"two runs of the program with the same draws differ: {words}")

    def choose(self, chances: list[float]) -> int:
        """The branch of a fork whose branches have these probabilities."""
        if self.used == len(self.path):
            first, *others = [branch for branch, chance in enumerate(chances) if chance > LEAST]
            self.untried += [[*self.path, (chances, other)] for other in others]
            self.path.append((chances, first))
        expected, branch = self.path[self.used]
        if expected is not chances:
            self.check(len(expected) == len(chances))
            self.check(all(abs(a - b) < 1e-6 for a, b in zip(expected, chances)))
        self.used += 1
        self.probability *= chances[branch]
        return branch

    def draw(self, weights: list[float], count: int, replacement: bool = False) -> list[int]:
        """``count`` tokens, each drawn from the ``weights`` (V,) that the ones before leave."""
        tokens: list[int] = []
        left = list(weights)
        for _ in range(count):
            total = math.fsum(left)
            if not 0 < total < math.inf or min(left) < 0:
                raise ValueError(f"nothing can be drawn from weights that sum to {total}")
            tokens.append(self.choose([weight / total for weight in left]))
            if not replacement:
                left[tokens[-1]] = 0.0
        return tokens

    def is_below(self, number: int, bound: float) -> bool:
        """Whether a number is below a bound. This may be a fork; then more is known of it."""
        low, high = self.intervals[number]
        if not low < bound < high:
            return low < bound
        chance = (bound - low) / (high - low)
        below = self.choose([chance, 1.0 - chance]) == 0
        self.intervals[number] = (low, bound) if below else (bound, high)
        return below

    def compare(self, numbers: Uniform, bounds: Any, below: bool) -> Tensor:
        """Whether each of the ``numbers`` is ``below`` its bound, or else above it."""
        bounds = torch.as_tensor(self.known(bounds), dtype=torch.float64)
        ids, bounds = torch.broadcast_tensors(numbers, bounds)
        pairs = zip(ids.flatten().tolist(), bounds.flatten().tolist())
        # Nothing is below or above NaN.
        found = [bound == bound and self.is_below(int(id), bound) == below for id, bound in pairs]
        return torch.tensor(found, dtype=torch.bool).reshape(ids.shape)

    def number(self, number: int) -> float:
        """A number itself, at the point of this run."""
        low, high = self.intervals[number]
        if low < high:
            if self.point is None:
                self.integrated = True
                self.point = self.points[self.choose(self.equal)]
            low += (high - low) * self.point[number]
            self.intervals[number] = (low, low)
        return low

    def known(self, value: Any) -> Any:
        """``value`` with the numbers themselves."""
        if type(value) in (list, tuple):
            return type(value)(self.known(each) for each in value)
        if not isinstance(value, Uniform):
            return value
        numbers = [self.number(int(id)) for id in value.flatten().tolist()]
        return torch.tensor(numbers, dtype=value.dtype).reshape(value.shape)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if kwargs.get("generator") is not None or (name in DRAWN and "out" in kwargs):
            raise ValueError(f"the program draws by {name} with generator= or out=: leave it out")
        first, second = (*args, None, None)[:2]
        if name in DRAWN and not isinstance(first, Uniform):
            return DRAWN[name](self, *args, **kwargs)
        if not self.intervals:
            return function(*args, **kwargs)
        below = BELOW.get(name)
        if isinstance(first, Uniform) and name in FORMS:
            return first.reshape(()) if name == "item" else function(*args, **kwargs)
        if isinstance(first, Uniform) and below is not None:
            return self.compare(first, second, below)
        if isinstance(second, Uniform) and below is not None:
            return self.compare(second, first, not below)
        known = self.known(tuple(args))
        result = function(*known, **{key: self.known(value) for key, value in kwargs.items()})
        if isinstance(first, Uniform) and (result is known[0] or name == "__setitem__"):
            raise ValueError(f"{name} changes random numbers in place, which is not seen")
        return result

    # What takes the place of PyTorch's functions.

    def uniform(self, like: Tensor) -> Uniform:
        first = len(self.intervals)
        self.intervals += [(0.0, 1.0)] * like.numel()
        if len(self.intervals) > NUMBERS:
            raise ValueError(f"a run of the program takes more than {NUMBERS} uniform numbers")
        ids = torch.arange(first, len(self.intervals), dtype=like.dtype)
        return ids.reshape(like.shape).as_subclass(Uniform)

    def rand(self, *size: Any, **options: Any) -> Uniform:
        return self.uniform(torch.zeros(*(size or [()]), **options))

    def multinomial(self, input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
        rows = input.reshape(-1, input.shape[-1]).tolist()
        tokens = [self.draw(row, num_samples, replacement) for row in rows]
        return torch.tensor(tokens).reshape(*input.shape[:-1], num_samples)

    def bernoulli(self, input: Tensor, p: Any = None) -> Tensor:
        return self.compare(self.uniform(input), input if p is None else p, True).to(input.dtype)

    def uniform_(self, into: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return into.copy_(low + (high - low) * self.known(self.uniform(into)))

    def exponential_(self, into: Tensor, lambd: float = 1.0) -> Tensor:
        return into.copy_(-torch.log(self.known(self.uniform(into))) / lambd)


DRAWN: dict[str, Callable[..., Any]] = {
    "rand": Forks.rand,
    "rand_like": lambda forks, *like, **options: forks.uniform(torch.zeros_like(*like, **options)),
    "multinomial": Forks.multinomial,
    "bernoulli": Forks.bernoulli,
    "bernoulli_": lambda forks, into, p=0.5: into.copy_(forks.bernoulli(into, p)),
    "uniform_": Forks.uniform_,
    "exponential_": Forks.exponential_,
}
# What gives numbers another form, or tells of it.
FORMS = set("item __get__ __getitem__ __len__ dim size numel squeeze unsqueeze view".split())
FORMS |= set("reshape flatten expand transpose contiguous detach clone unbind select".split())
FORMS |= set("narrow split gather float double to cpu".split())
BELOW = {"lt": True, "le": True, "gt": False, "ge": False}


class ForkedDraws(Draws):
    """The draws of this project's rules as forks."""

    def __init__(self, forks: Forks, seed: int | None) -> None:
        if seed in forks.seeds:
            raise ValueError(f"two Draws with the seed {seed} give the same numbers")
        forks.seeds.add(seed)
        self.forks = forks
        self.noise_row = cache(self.new_noise)

    def flip(self, probability: float) -> bool:
        chance = min(1.0, max(0.0, probability))
        return self.forks.choose([chance, 1.0 - chance]) == 0

    def draw(self, probs: Tensor) -> Tensor:
        return self.forks.multinomial(probs, 1)[:, 0]

    def candidates(self, probs: Tensor, count: int) -> Tensor:
        rows = []
        for row in probs.tolist():
            tokens = self.forks.draw(row, min(count, sum(prob > 0 for prob in row)))
            rows.append(tokens + [each for each in range(len(row)) if each not in tokens])
        return torch.tensor(rows)[:, :count]

    def noise(self, positions: Sequence[int], like: Tensor) -> Tensor:
        rows = [self.noise_row(position, like.shape[-1]) for position in positions]
        return torch.stack(rows).to(like)

    def new_noise(self, position: int, size: int) -> Tensor:
        return -torch.empty(size, dtype=torch.float64).exponential_().log()
