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
from .tree import FixedShape, GrowingShape, Node, Shape

MAX_NODES = 8192  # that are drafted in a step: a mask takes the square of what is sent
# A method is a preset of two settings: which of the draft's exits draft, and the shape of trees.
METHODS = {
    "ar": ("none", "chain"),  # plain, autoregressive decoding
    "sd": ("last", "chain"),
    "mcsd": ("last", (4, 2, 2, 1)),  # the k-config of arXiv 2401.06706
    "s2d": ("all", "chain"),
    "s2d-tree": ("all", "growing"),
}
# A draft's config.json overrides these. ``growing`` is top_k, depth and size; ``stop`` is the
# default of chains, and ``tree_stop`` of trees.
DEFAULTS = dict(
    method="s2d", thresholds=(), draft_length=6, stop=0.0, growing=(10, 4, 60), tree_stop=0.0
)
THRESHOLD = 0.5  # as published


@dataclass(frozen=True)
class Options:
    """All settings of an answer, as they were decided."""

    method: str = "ar"  # one of METHODS, for reports: exits, tree and stop say what it means
    # Layers after which the draft may predict, in ascending order; 0 is a table (ngram/table.py). A
    # function (target, draft) -> ``Exit`` (draft.py), such as a class, may stand among them.
    exits: tuple[int | Callable[..., Any], ...] = ()
    thresholds: tuple[float, ...] = ()  # a confidence above it is enough; the last exit has none
    # The shape of each tree, or a function that makes it for an answer; a chain is a tree, too.
    tree: Shape | Callable[[], Shape] = FixedShape(())
    stop: float = 0.0  # a path is not continued if its estimated probability is lower
    max_new_tokens: int = 128  # the answer ends after so many tokens, if not before
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # the share of the probability that nucleus sampling keeps; 1 keeps all
    top_k: int = 0  # the number of tokens that may be sampled; 0 keeps all
    seed: int = 0  # of all random numbers
    # "noise", "rejection" or a function (distribution, draws) -> ``Rule`` (rules.py), or a class.
    rule: str | Callable[..., Any] = "noise"
    stop_at: Any = None  # where an answer ends besides EOS: ``StopStrings(tokenizer, ["User:"])``
    drafter: Callable[..., Any] | None = None  # a class that extends ``SortedDraft`` (draft.py)
    decoder: Callable[..., Any] | None = None  # a class that extends ``Decoder`` (decoder.py)

    def __post_init__(self) -> None:
        """ValueError for the first setting that cannot be run."""
        words = "exits: expected increasing numbers of layers, or functions (target, draft) -> Exit"
        is_right = self.layers == sorted({*self.layers}) and min(self.layers, default=0) >= 0
        expect(is_right, words, self.exits)
        are_right = all(is_number(each, 0, inf) for each in self.thresholds)
        expect(are_right, "thresholds: expected numbers from 0", self.thresholds)
        words = f"tree: expected widths from 1, or a Shape, with up to {MAX_NODES} nodes"
        expect(can_grow(self.tree), words, self.tree)
        expect(is_number(self.stop, 0, 1), "stop: expected a number from 0 to 1", self.stop)
        words = "temperature: expected 0, or a number from 1e-6 to 1e6"
        is_right = self.temperature == 0 or is_number(self.temperature, 1e-6, 1e6)
        expect(is_right, words, self.temperature)
        is_right = is_number(self.top_p, 1e-6, 1)
        expect(is_right, "top_p: expected a number from 1e-6 to 1", self.top_p)
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
            value = getattr(self, name)
            is_right = isinstance(value, Integral) and value >= least
            expect(is_right, f"{name}: expected a whole number from {least}", value)
        words = "rule: expected 'noise', 'rejection' or a function (distribution, draws) -> Rule"
        expect(callable(self.rule) or self.rule in ("noise", "rejection"), words, self.rule)
        is_right = hasattr(self.stop_at, "begin") and not isinstance(self.stop_at, type)
        is_right = is_right or self.stop_at is None
        expect(is_right, "stop_at: expected an object such as StopStrings", self.stop_at)

    @property
    def layers(self) -> list[int]:
        """The exits that are numbers."""
        return [each for each in self.exits if not callable(each)]

    @property
    def distribution(self) -> Distribution:
        return Distribution(self.temperature, self.top_p, self.top_k)


def is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, Real) and least <= value <= most and value < inf


def can_grow(shape: Shape | Callable[[], Shape]) -> bool:
    """Whether trees of this shape can be drafted; a shape of your own says so itself."""
    if isinstance(shape, GrowingShape):
        grown = shape.top_k**2 * shape.depth
        return min(shape.top_k, shape.depth, shape.size) >= 1 and grown <= MAX_NODES
    if isinstance(shape, FixedShape):
        widths = [index(width) for width in shape.widths]
        return min(widths, default=1) >= 1 and sum(accumulate(widths, mul)) <= MAX_NODES
    return callable(shape) or shape.depth >= 0


def fill_in(
    own: dict[str, Any],
    method: str | None = None,
    exits: Sequence[int | Callable[..., Any]] | None = None,
    thresholds: Sequence[float] | None = None,
    draft_length: int | None = None,
    tree: Sequence[int] | Shape | Callable[[], Shape] | None = None,
    stop: float | None = None,
    **others: Any,
) -> Options:
    """What is given, and a draft's ``own`` defaults for the rest; ValueError for what cannot run.

    Args:
        method: one of METHODS. Exits and shapes that are given take the place of the method's.
        exits, others: see ``Options``. An exit's own ``threshold`` comes before that in ``own``.
        thresholds: one for each exit but the last, which always answers. One for it is not read.
        draft_length: the most tokens of a chain, which is drafted in the place of a tree.
        tree: the children of each node, by level, such as (4, 2, 2, 1); or a ``Shape``; or a
            function that makes the Shape of each answer, such as a class: for a shape that learns.
    """
    own = DEFAULTS | own
    asked = own["exits"] if exits is None else exits
    if len(asked) == 1:  # an exit that drafts alone may have defaults of its own
        own |= getattr(with_exit_0(asked)[0], "drafting", {})
    stop = plain_number(stop)
    others = {name: plain_number(value) for name, value in others.items()}
    if method is None:
        method = own["method"] if draft_length is None else "s2d"
    expect(method in METHODS, f"method: expected {', '.join(METHODS)}", method)
    which, preset = METHODS[method]
    if which == "none":  # what is given for drafting is passed over
        return Options(method, **others)
    if exits is None:
        exits = own["exits"] if which == "all" else own["exits"][-1:]
    expect(len(exits) > 0, "exits: expected at least one", exits)
    exits = tuple(each if callable(each) else index(each) for each in exits)  # NumPy's, too
    if thresholds is None:
        known = dict(zip(own["exits"][:-1], own["thresholds"]))  # the last one's is not read
        makers = with_exit_0(exits)
        thresholds = [getattr(each, "threshold", known.get(each, THRESHOLD)) for each in makers]
    thresholds = [plain_number(each) for each in thresholds]
    if len(thresholds) not in (len(exits), len(exits) - 1):
        raise ValueError(f"{len(exits)} exits, but {len(thresholds)} thresholds")
    if tree is not None and draft_length is not None:
        raise ValueError("tree: expected without draft_length, as a tree has its own depth")
    if draft_length is not None or (tree is None and preset == "chain"):
        length = own["draft_length"] if draft_length is None else draft_length
        expect(0 < length <= MAX_NODES, f"draft_length: expected 1 to {MAX_NODES}", length)
        tree = (1,) * length
    elif tree is None:
        tree = GrowingShape(*own["growing"]) if preset == "growing" else preset
    shape = make_shape(tree)
    if stop is None:
        stop = own["stop"] if is_chain(shape) else own["tree_stop"]
    if callable(tree):
        shape = tree  # the function itself: each answer makes its own
    return Options(method, exits, tuple(thresholds[: len(exits) - 1]), shape, stop, **others)


def with_exit_0(exits: Sequence[Any]) -> tuple[Any, ...]:
    """The ``exits`` with the class of exit 0 in the place of its number."""
    if 0 not in exits:
        return tuple(exits)
    from .ngram.table import TableExit  # its room is asked only if it is used

    return tuple(TableExit if each == 0 else each for each in exits)


def plain_number(value: Any) -> Any:
    """NumPy's and PyTorch's numbers as those of Python; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def make_shape(tree: Sequence[int] | Shape | Callable[[], Shape]) -> Shape:
    """The shape of one answer, which ``tree`` is, makes, or lists as widths."""
    if hasattr(tree, "frontier") and not isinstance(tree, type):  # a class is called
        return tree
    return tree() if callable(tree) else FixedShape(tuple(tree))


def is_chain(shape: Shape) -> bool:
    """Whether no node gets more than one child; a shape of your own is judged by its root."""
    widths = shape.widths if isinstance(shape, FixedShape) else [shape.width(Node(token=0))]
    return max(widths, default=1) == 1


def expect(is_right: bool, words: str, found: Any) -> None:
    """ValueError, with ``words`` and what was ``found`` in one line, unless it ``is_right``."""
    if not is_right:
        raise ValueError(f"{words}, not {short(found)}")


def short(value: Any) -> str:
    """A value in a message: in one line, and not long."""
    return f"{' '.join(repr(value).split()):.60}"
