"""The exact law of a program that draws at random: each of its outcomes, with its probability.

``law`` runs a program again and again. Each random draw is a fork, and each run takes another
branch, until all of them are taken. The program is any code that draws by PyTorch or by
``random.random``: a verification function or a whole decoder, of this project or of another one.
It is not changed, and knows nothing of this.
"""

import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.quasirandom import SobolEngine

from ..checkpoint.notices import progress
from ..sampling import Draws

REPEATS = 32  # runs that are made twice, to see that nothing but the forks decides
NUMBERS = 256  # uniform numbers in a run, at most: their ids are exact in any float type
LEAST = 1e-12  # branches that are less probable are not taken: they come from rounding
UNSEEN = "it draws in a way that is not seen, or keeps something from run to run"
DIFFER = f"two runs of the program with the same draws differ: {UNSEEN}"
# What gives a program random bits of its own, and what that calls, by whatever name it is known.
SOURCES = {"os.urandom": "os.urandom", "random.Random": "random.Random.seed"}
LOCK = "RLock" if hasattr(np.random.bit_generator, "RLock") else "Lock"  # before NumPy 2.4
SOURCES["a generator of NumPy"] = f"numpy.random.bit_generator.{LOCK}"
Outcome = tuple[int, ...]
Program = Callable[[Draws], Iterable[int]]
Path = list[int]  # the branches that were taken


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


def law(program: Program, points: int = 2048, limit: int = 100_000) -> Law:
    """The law of what ``program(draws)`` returns: tokens, or other whole numbers.

    A program of this project takes its random numbers from ``draws``, or from a ``Draws`` that it
    makes; others need not look at it. Where a uniform number is only compared, the comparison is a
    fork, and the law is exact. What is computed from a number, such as noise, is integrated over so
    many ``points``; with 2048, a distance has an error of 0.01 to 0.03.

    Raises ValueError if there are more than ``limit`` outcomes, if the program draws in a way that
    is not seen, or if it keeps something from run to run.
    """
    ends: list[tuple[Path, Outcome, float]] = []
    waiting: list[Path] = [[]]
    with ExitStack() as stack:
        with suppress(Exception):
            list(program(Draws(seed=0)))  # loads the modules that it imports: these may seed
        forks = Forks(points)
        for name, part in SOURCES.items():
            stack.enter_context(patch(part, partial(refuse, name)))
        stack.enter_context(patch("random.random", lambda: torch.rand(())))
        stack.enter_context(patch.object(Draws, "__init__", ForkedDraws.__init__))
        for _ in progress(range(limit), "runs of the program"):
            path = waiting.pop()
            ends.append((path, *forks.run(program, path)))
            waiting += forks.untried
            if not waiting:
                break
        else:
            raise ValueError(f"the program has more than {limit:,} outcomes")
        for number in range(REPEATS):
            path, outcome, _ = ends[number * len(ends) // REPEATS]
            if forks.run(program, path)[0] != outcome:
                raise ValueError(DIFFER)
    probs: dict[Outcome, float] = {}
    for _, outcome, probability in ends:
        probs[outcome] = probs.get(outcome, 0.0) + probability
    if abs(sum(probs.values()) - 1.0) > 1e-6:
        raise ValueError(DIFFER)
    return Law(probs, enumerated=not forks.integrated)


def refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """In the place of what one of the SOURCES calls."""
    raise ValueError(f"the program draws by {name}, which is not seen")


class Uniform(Tensor):
    """Random numbers in [0, 1) of which only intervals are known. The values are their ids."""


class Forks(TorchFunctionMode):
    """The runs of a program. In this context, random draws of PyTorch are forks."""

    def __init__(self, points: int) -> None:
        super().__init__()
        table = SobolEngine(NUMBERS, scramble=True, seed=0).draw(points)
        self.points = table.clamp(1e-6, 1 - 1e-6).tolist()
        self.integrated = False
        twin = torch.default_generator.clone_state()
        self.twins = {
            "PyTorch": (partial(torch.rand, ()), partial(torch.rand, (), generator=twin)),
            "Python's random": (random.random, deepcopy(random.random.__self__).random),
            "NumPy": (np.random.random, deepcopy(np.random.random)),
        }

    def run(self, program: Program, path: Path) -> tuple[Outcome, float]:
        """The outcome and its probability, by the branches of ``path``, and then the first ones.

        The paths with the other branches go to ``untried``.
        """
        self.path = list(path)
        self.used = 0  # forks so far
        self.probability = 1.0
        self.untried: list[Path] = []
        self.intervals: list[tuple[float, float]] = []  # of each uniform number, by its id
        self.point: list[float] | None = None  # None until a number itself is asked for
        with self:
            found = program(Draws(seed=0))
            found = found.flatten() if isinstance(found, Tensor) else found
            outcome = tuple(int(token) for token in found)
        self.advance()
        return outcome, self.probability

    def advance(self) -> None:
        """Draw from each shared generator and from its twin, which is not seeded nor put back."""
        for name, (shared, twin) in self.twins.items():
            if shared() != twin():
                raise ValueError(f"the program draws by {name} in a way that is not seen, or seeds")

    def choose(self, weights: list[float]) -> int:
        """The branch of a fork. The ``weights`` are in proportion to the probabilities."""
        total = sum(weights)
        if min(weights) < 0 or not 0 < total < inf:
            wrong = "are negative: is a clamp missing?" if min(weights) < 0 else f"sum to {total}"
            raise ValueError(f"nothing can be drawn from weights that {wrong}")
        if self.used == len(self.path):
            least = LEAST * total
            first, *others = [branch for branch, weight in enumerate(weights) if weight > least]
            self.untried += [[*self.path, other] for other in others]
            self.path.append(first)
        branch = self.path[self.used]
        if branch >= len(weights):
            raise ValueError(DIFFER)
        self.used += 1
        self.probability *= weights[branch] / total
        return branch

    def compare(self, numbers: Uniform, bounds: Any, below: bool) -> Tensor:
        """Whether each of the ``numbers`` is ``below`` its bound, or else above it.

        Each may be a fork; then more is known of the number.
        """
        bounds = torch.as_tensor(self.known(bounds), dtype=torch.float64)
        ids, bounds = torch.broadcast_tensors(numbers, bounds)
        found = []
        for number, bound in zip(ids.int().flatten().tolist(), bounds.flatten().tolist()):
            low, high = self.intervals[number]
            if low < bound < high:
                is_below = self.choose([bound - low, high - bound]) == 0
                low, high = (low, bound) if is_below else (bound, high)
                self.intervals[number] = (low, high)
            found.append(high <= bound if below else bound <= low)
        return torch.tensor(found, dtype=torch.bool).reshape(ids.shape)

    def known(self, value: Any) -> Any:
        """``value`` with the numbers themselves, at the point of this run."""
        if type(value) in (list, tuple):
            return type(value)(map(self.known, value))
        if not isinstance(value, Uniform):
            return value
        if self.point is None:
            self.integrated = True
            self.point = self.points[self.choose([1.0] * len(self.points))]
        numbers = []
        for number in value.int().flatten().tolist():
            low, high = self.intervals[number]
            low += (high - low) * self.point[number]
            self.intervals[number] = (low, low)
            numbers.append(low)
        return torch.tensor(numbers, dtype=value.dtype).reshape(value.shape)

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(call, "__name__", "")
        if kwargs.pop("generator", None) is not None or (name in DRAWS and "out" in kwargs):
            raise ValueError(f"the program draws by {name} with generator= or out=: leave it out")
        if name in DRAWS:
            self.advance()
            return getattr(self, name)(*self.known(args), **kwargs)
        if not self.intervals:
            return call(*args, **kwargs)
        first, second = (*args, None, None)[:2]
        if isinstance(first, Uniform) and name in FORMS:
            return first.reshape(()) if name == "item" else call(*args, **kwargs)
        if isinstance(first, Uniform) and name in COMPARISONS:
            return self.compare(first, second, below=name in ("lt", "le"))
        if isinstance(second, Uniform) and name in COMPARISONS:
            return self.compare(second, first, below=name in ("gt", "ge"))
        known = self.known(args)
        result = call(*known, **{key: self.known(value) for key, value in kwargs.items()})
        if isinstance(first, Uniform) and (result is known[0] or name == "__setitem__"):
            raise ValueError(f"{name} changes random numbers in place, which is not seen")
        return result

    # The functions of PyTorch with these names are replaced by:

    def rand(self, *size: Any, **options: Any) -> Uniform:
        return self.rand_like(torch.zeros(*size, **options))

    def rand_like(self, input: Tensor, **options: Any) -> Uniform:
        like = torch.zeros_like(input, **options)
        first = len(self.intervals)
        self.intervals += [(0.0, 1.0)] * like.numel()
        if len(self.intervals) > NUMBERS:
            raise ValueError(f"a run of the program takes more than {NUMBERS} uniform numbers")
        ids = torch.arange(first, len(self.intervals), dtype=like.dtype)
        return ids.reshape(like.shape).as_subclass(Uniform)

    def multinomial(self, input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
        tokens = []
        for row in input.reshape(-1, input.shape[-1]).tolist():
            for _ in range(num_samples):
                tokens.append(self.choose(row))
                if not replacement:
                    row[tokens[-1]] = 0.0
        return torch.tensor(tokens, device=input.device).reshape(*input.shape[:-1], num_samples)

    def bernoulli(self, input: Tensor, p: float | None = None) -> Tensor:
        chances = input.flatten().tolist() if p is None else [p] * input.numel()
        found = [self.choose([1.0 - chance, chance]) for chance in chances]
        return torch.tensor(found, dtype=input.dtype).reshape(input.shape)

    def exponential_(self, into: Tensor, lambd: float = 1.0) -> Tensor:
        return into.copy_(-torch.log(self.known(self.rand_like(into))) / lambd)

    def uniform_(self, into: Tensor, low: float = 0.0, to: float = 1.0) -> Tensor:
        return into.copy_(low + (to - low) * self.known(self.rand_like(into)))


DRAWS = "rand", "rand_like", "multinomial", "bernoulli", "exponential_", "uniform_"
COMPARISONS = "lt", "le", "gt", "ge"
# What gives numbers another form, or tells of it.
FORMS = set("item __get__ __getitem__ __len__ dim size numel squeeze unsqueeze view".split())
FORMS |= set("reshape flatten expand transpose contiguous detach clone unbind select".split())
FORMS |= set("narrow split gather float double to cpu".split())


class ForkedDraws(Draws):
    """The draws of this project's rules, by functions of PyTorch that are forks."""

    def __init__(self, seed: int) -> None:
        self.__class__ = ForkedDraws  # in a law, every Draws begins here
        self.rows = {}  # of noise

    def flip(self, probability: float) -> bool:
        chance = torch.tensor(probability, dtype=torch.float64).clamp(0.0, 1.0)
        return bool(torch.bernoulli(chance))

    def draw(self, probs: Tensor) -> Tensor:
        return torch.multinomial(probs, 1)[:, 0]

    def candidates(self, probs: Tensor, count: int) -> Tensor:
        # Tokens of probability 0 come last: as long as there are others, they are no branch.
        return torch.multinomial(probs.clamp(min=1e-30), count)

    def make_noise(self, position: int, size: int, device: Any, dtype: Any) -> Tensor:
        return -torch.empty(size, device=device, dtype=dtype).exponential_().log()
