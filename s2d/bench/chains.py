"""A model of decoding with chains: how long it would take, by what passes cost and exits say.

It replays the decoder on texts of the target's own, at whose tokens every exit was asked. What a
draft says after a token that the target does not take is not known there: it is assumed to go on as
if that token had been right. So costs are estimates, while tokens per step are those of the decoder
but for the end of a text.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product, takewhile

from ..mask import MAX_UNREAD

Curve = dict[int, float]  # {rows: seconds of a pass over so many}, rows in ascending order
Segment = tuple[int, int]  # (layers before it, layers up to its exit)

# The chains that are compared: from one to so many exits, with all of these.
MOST_EXITS = 3
THRESHOLDS = 0.2, 0.4, 0.6, 0.8
LENGTHS = 1, 2, 3, 4, 6, 8, 12, 16
STOPS = 0.0, 0.2, 0.35, 0.5


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Attributes:
        target: of a target pass.
        exits: by segment, the layers from one exit or the beginning to another exit, of reading
            so many rows there and predicting after the last one. Exit 0 is the segment (0, 0).
        level: of each drafted token, for what is not an exit's: growing the chain and its masks.
        rest: of each step, for what is neither the draft's nor the target's pass.
    """

    target: Curve
    exits: dict[Segment, Curve]
    level: float
    rest: float


@dataclass(frozen=True)
class Guess:
    """What an exit says about the next token of a text."""

    confidence: float
    prob: float  # the rule's estimate that its token is accepted
    right: bool


@dataclass(frozen=True)
class Text:
    """An answer, and what each exit says about each of its tokens."""

    prompt_length: int
    guesses: list[dict[int, Guess]]  # by token: {exit: guess}


@dataclass(frozen=True)
class Chain:
    """How chains are drafted, see ``options.Settings``; without exits it is plain decoding."""

    exits: tuple[int, ...]
    thresholds: tuple[float, ...]
    length: int
    stop: float


ALONE = Chain(exits=(), thresholds=(), length=0, stop=0.0)


@dataclass(frozen=True)
class Outcome:
    tokens: int
    steps: int
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def segments(exits: tuple[int, ...]) -> list[Segment]:
    """Those that lead to each of ``exits``, in order.

    >>> segments((0, 2, 4))
    [(0, 0), (0, 2), (2, 4)]
    """
    return list(zip((0, *exits), exits))


def find_best(exits: tuple[int, ...], texts: list[Text], costs: Costs) -> Chain:
    """The chain of ``every_chain`` with the most tokens per second."""
    return max(
        every_chain(exits), key=lambda chain: simulate(chain, texts, costs).tokens_per_second
    )


def every_chain(exits: tuple[int, ...]) -> Iterator[Chain]:
    for count in range(1, MOST_EXITS + 1):
        for chosen in combinations(exits, count):
            for thresholds in product(THRESHOLDS, repeat=count - 1):  # the last exit needs none
                for length, stop in product(LENGTHS, STOPS):
                    yield Chain(chosen, (*thresholds, 0.0), length, stop)


def simulate(chain: Chain, texts: list[Text], costs: Costs) -> Outcome:
    """What decoding ``texts`` with a ``chain`` would take."""
    tokens = 0
    steps = 0
    seconds = 0.0
    for text in texts:
        read = 0  # tokens that the target has read
        exits_read = dict.fromkeys(chain.exits, 0)  # and that each exit has read
        place = 0  # tokens of the answer that are there
        while place < len(text.guesses):
            n = text.prompt_length + place
            drafted: list[bool] = []
            if n - read <= MAX_UNREAD:  # otherwise a step reads the prompt and drafts nothing
                drafted, draft_seconds = draft_chain(chain, text, place, exits_read, costs)
                seconds += draft_seconds
            seconds += interpolate(costs.target, n - read + len(drafted)) + costs.rest
            accepted = len(list(takewhile(bool, drafted)))
            read = n + accepted
            exits_read = {each: min(count, read) for each, count in exits_read.items()}
            place += accepted + 1
            steps += 1
        tokens += len(text.guesses)
    return Outcome(tokens, steps, seconds)


def draft_chain(
    chain: Chain, text: Text, place: int, exits_read: dict[int, int], costs: Costs
) -> tuple[list[bool], float]:
    """(which of the tokens drafted from ``place`` on are right, seconds); advances ``exits_read``.

    As ``SortedDraft.grow`` with its ``predict``.
    """
    drafted = []
    seconds = 0.0
    path_prob = 1.0
    for each_place in range(place, min(place + chain.length, len(text.guesses))):
        n = text.prompt_length + each_place
        seconds += costs.level
        for segment, threshold in zip(segments(chain.exits), chain.thresholds):
            each = segment[1]
            seconds += interpolate(costs.exits[segment], n - exits_read[each])  # catch-up included
            exits_read[each] = n
            guess = text.guesses[each_place][each]
            if guess.confidence > threshold:
                break  # the exits after it are not asked
        if guess.confidence == 0.0:
            break  # nothing is known
        drafted.append(guess.right)
        path_prob *= guess.prob
        if path_prob < chain.stop:
            break
    return drafted, seconds


def interpolate(curve: Curve, rows: int) -> float:
    """Seconds of a pass over ``rows`` rows, on straight lines through those of a ``curve``.

    >>> [interpolate({1: 1.0, 2: 2.0, 4: 3.0}, rows) for rows in (1, 2, 3, 6)]
    [1.0, 2.0, 2.5, 4.0]
    """
    known = list(curve)
    if len(known) == 1:
        return curve[known[0]]
    upper = min(max(bisect_left(known, rows), 1), len(known) - 1)
    before = known[upper - 1]
    after = known[upper]
    slope = max(0.0, curve[after] - curve[before]) / (after - before)
    return curve[before] + slope * (rows - before)
