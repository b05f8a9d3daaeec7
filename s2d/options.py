"""The settings of an answer: what a caller gives, and the draft's defaults for what is not given.

The setting of the S2D paper is ``rule="rejection", stop=0`` (on the command line ``--paper``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from numbers import Integral, Real
from operator import index, mul
from typing import Any

from .sampling import Distribution
from .tree import FixedShape, GrowingShape, Shape

# A method is a preset of two settings: which of the draft's exits draft, and the shape of trees.
METHODS = {
    "ar": ("none", "chain"),  # plain, autoregressive decoding
    "sd": ("last", "chain"),
    "mcsd": ("last", (4, 2, 2, 1)),  # the k-config of arXiv 2401.06706
    "s2d": ("all", "chain"),
    "s2d-tree": ("all", "growing"),
}
# What is given comes first, then what a draft's config.json says, and then this. A growing tree has
# top_k, depth and size; ``stop`` is the default of chains, and ``tree_stop`` of trees.
DEFAULTS = dict(
    method="s2d", thresholds=(), draft_length=6, stop=0.0, tree_stop=0.0, tree=(10, 4, 60)
)
THRESHOLD = 0.5  # of an exit without a threshold in config.json: the published one
MAX_NODES = 1024  # of a tree: its mask takes this number squared
MAX_GROWN = 8192  # nodes of a growing tree before some are left out
# The settings that are numbers: of which kind, from and up to what.
RANGES = {
    "max_new_tokens": (Integral, 1, inf),
    "temperature": (Real, 0, 1e6),
    "top_p": (Real, 1e-6, 1),
    "top_k": (Integral, 0, inf),
    "seed": (Integral, 0, inf),
    "stop": (Real, 0, 1),
    "draft_length": (Integral, 1, MAX_NODES),
}


@dataclass(frozen=True)
class Options:
    """All settings of an answer, as they were decided."""

    method: str = "ar"  # one of METHODS, by which it is reported: the next four say what it means
    # The numbers of layers after which the draft may predict, in ascending order; 0 is the n-gram
    # table. A function (target, draft) -> ``draft.Exit`` may stand among them, such as a class.
    exits: tuple[int | Callable[..., Any], ...] = ()
    thresholds: tuple[float, ...] = ()  # a confidence above it is enough; the last exit has none
    shape: Shape = FixedShape(())  # of the trees; a chain is a tree, too
    stop: float = 0.0  # a path is not continued if its estimated probability is lower
    max_new_tokens: int = 128  # the answer ends after so many tokens, if not before
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # the share of the probability that nucleus sampling keeps; 1 keeps all
    top_k: int = 0  # the number of tokens that may be sampled; 0 keeps all
    seed: int = 0  # of all random numbers
    # "noise", "rejection" or a function (distribution, draws) -> ``rules.Rule``, such as a class.
    rule: str | Callable[..., Any] = "noise"
    # Where an answer ends besides EOS, such as ``StopStrings(tokenizer, ["User:"])``.
    stop_at: Any = None
    # Classes that extend ``draft.SortedDraft`` and ``decoder.Decoder``, if it is not these.
    drafter: Callable[..., Any] | None = None
    decoder: Callable[..., Any] | None = None

    @property
    def distribution(self) -> Distribution:
        return Distribution(self.temperature, self.top_p, self.top_k)


def fill_in(
    own: dict[str, Any],
    method: str | None = None,
    exits: Sequence[int | Callable[..., Any]] | None = None,
    thresholds: Sequence[float] | None = None,
    draft_length: int | None = None,
    tree: Sequence[int] | Shape | None = None,
    stop: float | None = None,
    **others: Any,
) -> Options:
    """What is given, and a draft's ``own`` defaults for what is not; ValueError if it cannot be.

    Args:
        method: one of METHODS. Exits and shapes that are given take the place of the method's.
        exits, others: see ``Options``; the others are its fields from ``max_new_tokens`` on. An
            exit's default threshold is in ``own`` or, for a function, its attribute.
        thresholds: one for each exit but the last, which always answers. One for it is not read.
        draft_length: the most tokens of a chain, which is drafted in the place of a tree.
        tree: the children of each node, by level, such as (4, 2, 2, 1); or a ``Shape``.
    """
    own = DEFAULTS | own
    others = {name: in_range(name, value) for name, value in others.items()}
    if method is None:
        method = own["method"] if draft_length is None else "s2d"
    expect(method in METHODS, f"method: expected {', '.join(METHODS)}", method)
    which, shape = METHODS[method]
    if which == "none":  # what is given for drafting is passed over
        return refuse(Options(method, **others))
    if exits is None:
        exits = own["exits"] if which == "all" else own["exits"][-1:]
    exits = tuple(int(each) if isinstance(each, Integral) else each for each in exits)
    if thresholds is None:
        known = dict(zip(own["exits"], own["thresholds"]))
        thresholds = [getattr(each, "threshold", known.get(each, THRESHOLD)) for each in exits]
    if len(thresholds) not in (len(exits), len(exits) - 1):
        raise ValueError(f"{len(exits)} exits, but {len(thresholds)} thresholds")
    thresholds = tuple(map(float, thresholds[: len(exits) - 1]))
    if tree is not None and draft_length is not None:
        raise ValueError("tree: expected without draft_length, as a tree has its own depth")
    if tree is not None:
        shape = tree if hasattr(tree, "frontier") else FixedShape(tuple(map(index, tree)))
    elif draft_length is not None or shape == "chain":
        length = own["draft_length"] if draft_length is None else draft_length
        shape = FixedShape((1,) * in_range("draft_length", length))
    else:
        shape = GrowingShape(*own["tree"]) if shape == "growing" else FixedShape(shape)
    if stop is None:
        is_chain = isinstance(shape, FixedShape) and max(shape.widths, default=1) == 1
        stop = own["stop"] if is_chain else own["tree_stop"]
    return refuse(Options(method, exits, thresholds, shape, in_range("stop", stop), **others))


def in_range(name: str, value: Any) -> Any:
    """The ``value`` of a setting: as a plain number that is in its range, if it is a number."""
    if name not in RANGES:
        return value
    kind, low, high = RANGES[name]
    noun = "a whole number" if kind is Integral else "a number"
    is_right = isinstance(value, kind) and low <= value <= high
    expect(is_right, f"{name}: expected {noun} from {low:g} up to {high:g}", value)
    return int(value) if kind is Integral else float(value)


def refuse(options: Options) -> Options:
    """The ``options``, or ValueError for what cannot run."""
    exits, shape, rule = options.exits, options.shape, options.rule
    numbers = [each for each in exits if isinstance(each, int)]
    is_right = all(isinstance(each, int) or callable(each) for each in exits)
    expect(is_right, "exits: expected numbers of layers or functions (target, draft)", exits)
    is_right = numbers == sorted(set(numbers)) and (options.method == "ar" or len(exits) > 0)
    expect(is_right, "exits: expected increasing numbers of layers", exits)
    is_right = all(0 <= each < inf for each in options.thresholds)
    expect(is_right, "thresholds: expected numbers from 0", options.thresholds)
    is_right = not 0 < options.temperature < 1e-6
    expect(is_right, "temperature: expected 0, or at least 1e-6", options.temperature)
    is_right = rule in ("noise", "rejection") or callable(rule)
    expect(is_right, "rule: expected 'noise', 'rejection' or a function", rule)
    is_right = options.stop_at is None or hasattr(options.stop_at, "begin")
    expect(is_right, "stop_at: expected an object, such as StopStrings", options.stop_at)
    if isinstance(shape, GrowingShape):
        grown = shape.top_k**2 * shape.depth
        is_right = min(shape.top_k, shape.depth, shape.size) >= 1
        is_right = is_right and shape.size <= MAX_NODES and grown <= MAX_GROWN
    elif isinstance(shape, FixedShape):
        is_right = min(shape.widths, default=1) >= 1 and len(shape.widths) <= MAX_NODES
        is_right = is_right and sum(accumulate(shape.widths, mul)) <= MAX_NODES
    words = f"tree: expected 1 to {MAX_NODES} nodes, and up to {MAX_GROWN} before a tree is cut"
    expect(is_right, words, shape)
    return options


def expect(is_right: bool, words: str, found: Any) -> None:
    """ValueError, with ``words`` and what was ``found`` in one line, unless it ``is_right``."""
    if not is_right:
        raise ValueError(f"{words}, not {short(found)}")


def short(value: Any) -> str:
    """A value in a message: in one line, and not long."""
    return f"{' '.join(repr(value).split()):.60}"
