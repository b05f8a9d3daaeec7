"""The settings of an answer: what a caller gives, and the draft's defaults for what is not given.

README.md says where each part of the method is from. The setting of the S2D paper is
``rule="rejection", stop=0`` (on the command line ``--paper``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from numbers import Integral, Real
from operator import index, mul
from typing import Any

from torch import Tensor

from .rules import RuleMaker
from .sampling import warp
from .tree import FixedShape, GrowingShape, Shape

# A method is a name for two settings: which of the draft's exits draft, and the shape of the trees.
METHODS = {
    "ar": ("none", "chain"),  # plain, autoregressive decoding
    "sd": ("last", "chain"),
    "mcsd": ("last", (4, 2, 2, 1)),  # the k-config of arXiv 2401.06706
    "s2d": ("all", "chain"),
    "s2d-tree": ("all", "growing"),
}
# What is given comes first, then what a draft's config.json says, and then this. A growing tree has
# top_k, depth and size; ``stop`` is the default of chains.
DEFAULTS = dict(method="s2d", exits=(), thresholds=(), draft_length=6, stop=0.0, tree=(10, 4, 60))
# Exit 0 alone: tuned on SmolLM2-135M with its datastore (end of bench/README.md).
EXIT_0_ALONE = dict(
    method="s2d-tree", exits=(0,), thresholds=(), draft_length=4, stop=0.03, tree=(3, 5, 5)
)
THRESHOLD = 0.5  # of an exit without a threshold in config.json: the published one
# Exit 0 before exits with layers, which know more: tuned on miniatures (end of bench/README.md).
EXIT_0_THRESHOLD = 0.9
MAX_NODES = 1024  # of a tree: its mask takes this number squared
MAX_GROWN = 8192  # nodes of a growing tree before it is cut: its ancestor matrix takes their square
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
    # At temperature 0 nothing is drawn, and both names are one rule, ``Greedy``. A rule of your own
    # is then given a distribution of one token: to draft well there, let it extend ``Greedy``.
    rule: str | RuleMaker = "noise"
    init: str = "draft"  # what proposes the first level: it, or the "target" (mcsd/roots.py)
    decision: Any = None  # a model that estimates where drafting pays (mcsd/decision.py)
    datastore: Any = None  # n-grams of other texts, for exit 0 (ngram/datastore.py)
    # Where an answer ends besides EOS, such as ``StopStrings(tokenizer, ["User:"])``; or an object
    # of your own with ``begin`` and ``cut``, as it has.
    stop_at: Any = None

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from."""
        return warp(logits, self.temperature, self.top_p, self.top_k)


def decide(draft: Any, **given: Any) -> Options:
    """The settings for a ``draft``: see ``fill_in``. ValueError says what cannot be run."""
    try:
        options = fill_in(draft, **given)
        refuse(options, layers=0 if draft is None else draft.config.num_hidden_layers)
    except (AttributeError, TypeError) as error:  # such as a name that there is not
        raise ValueError(f"options: {error}") from error
    return options


def fill_in(
    draft: Any,
    method: str | None = None,
    exits: Sequence[int | Callable[..., Any]] | None = None,
    thresholds: Sequence[float] | None = None,
    draft_length: int | None = None,
    tree: Sequence[int] | Shape | None = None,
    stop: float | None = None,
    **others: Any,
) -> Options:
    """What is given, and the draft's defaults for what is not.

    Args:
        draft: a ``Llama``, a folder that is not loaded yet, or None for exit 0 alone.
        method: one of METHODS. Exits and shapes that are given take the place of the method's.
        exits, others: see ``Options``; the others are its fields from ``max_new_tokens`` on.
        thresholds: one for each exit but the last, which always answers. One for it is not read.
        draft_length: the most tokens of a chain, which is drafted in the place of a tree.
        stop: by default that of the draft for chains, and 0 for trees.
        tree: the children of each node, by level, such as (4, 2, 2, 1); or a ``Shape``.
    """
    others = {name: in_range(name, value) for name, value in others.items()}
    own = {} if draft is None else {"exits": (draft.config.num_hidden_layers,)} | draft.drafting
    if exits is None and draft is None:
        exits = (0,)
    if exits is not None:
        exits = tuple(int(each) if isinstance(each, Integral) else each for each in exits)
    defaults = EXIT_0_ALONE if exits == (0,) else DEFAULTS | own
    if method is None:
        method = defaults["method"] if draft_length is None else "s2d"
    expect(method in METHODS, f"method: expected {', '.join(METHODS)}", method)
    which, trees = METHODS[method]
    if which == "none":  # what is given for drafting is passed over
        exits, thresholds, tree, draft_length = (), (), (), None
        others |= {"init": "draft", "decision": None, "datastore": None}
    if exits is None:
        exits = defaults["exits"] if which == "all" else defaults["exits"][-1:]
    if thresholds is None:
        known = {0: EXIT_0_THRESHOLD} | dict(zip(defaults["exits"][:-1], defaults["thresholds"]))
        thresholds = [known.get(each, THRESHOLD) for each in exits]
    if len(thresholds) not in (len(exits), len(exits) - 1):
        raise ValueError(f"{len(exits)} exits, but {len(thresholds)} thresholds")
    if tree is not None and draft_length is not None:
        raise ValueError("tree: expected without draft_length, as a tree has its own depth")
    if tree is not None:
        shape = tree if hasattr(tree, "frontier") else FixedShape(tuple(map(index, tree)))
    elif draft_length is not None or trees == "chain":
        length = defaults["draft_length"] if draft_length is None else draft_length
        shape = FixedShape((1,) * in_range("draft_length", length))
    else:
        shape = GrowingShape(*defaults["tree"]) if trees == "growing" else FixedShape(trees)
    if stop is None and others.get("decision") is not None:
        stop = others["decision"].threshold  # of its estimates, which take the place of the rule's
    if stop is None:
        # A growing tree needs no other end; those of exit 0 alone do.
        is_chain = isinstance(shape, FixedShape) and max(shape.widths, default=0) == 1
        stop = defaults["stop"] if is_chain or defaults is EXIT_0_ALONE else 0.0
    thresholds = tuple(map(float, thresholds[: len(exits) - 1]))
    return Options(method, exits, thresholds, shape, in_range("stop", stop), **others)


def in_range(name: str, value: Any) -> Any:
    """The ``value`` of a setting: as a plain number that is in its range, if it is a number."""
    if name not in RANGES:
        return value
    kind, low, high = RANGES[name]
    noun = "a whole number" if kind is Integral else "a number"
    is_right = isinstance(value, kind) and low <= value <= high
    expect(is_right, f"{name}: expected {noun} from {low:g} up to {high:g}", value)
    return int(value) if kind is Integral else float(value)


def refuse(options: Options, layers: int) -> None:
    """ValueError for settings that a draft with so many ``layers`` cannot run."""
    exits, rule = options.exits, options.rule
    numbers = [each for each in exits if isinstance(each, int)]
    words = "exits: expected numbers of layers or functions (target, draft) -> Exit"
    expect(all(isinstance(each, int) or callable(each) for each in exits), words, exits)
    has_exits = options.method == "ar" or len(exits) > 0
    words = "exits: expected increasing numbers of layers"
    expect(has_exits and numbers == sorted(set(numbers)), words, exits)
    if not all(0 <= each <= layers for each in numbers):
        draft = f"the draft has {layers} layers" if layers else "there is no draft model"
        raise ValueError(f"exits {numbers}: {draft}")
    words = "thresholds: expected numbers from 0"
    expect(all(0 <= each < inf for each in options.thresholds), words, options.thresholds)
    words = "temperature: expected 0, or at least 1e-6"
    expect(not 0 < options.temperature < 1e-6, words, options.temperature)
    words = "rule: expected 'noise', 'rejection' or a function (distribution, draws) -> Rule"
    expect(rule in ("noise", "rejection") or callable(rule), words, rule)
    expect(options.init in ("draft", "target"), "init: expected 'draft' or 'target'", options.init)
    words = f"tree: expected 1 to {MAX_NODES} nodes, and up to {MAX_GROWN} before a tree is cut"
    expect(not exits or is_small(options.shape), words, options.shape)
    for name in ("stop_at", "datastore"):
        part = getattr(options, name)
        expect(not isinstance(part, type), f"{name}: expected an object, and not its class", part)
    if options.decision is not None and 0 in exits:
        raise ValueError("decision: expected exits with layers, and not exit 0")
    if options.datastore is not None and 0 not in exits:
        raise ValueError("datastore: expected exit 0 among the exits, which reads it")


def is_small(shape: Shape) -> bool:
    """Whether a tree of this shape has few enough nodes; others than ours are counted later."""
    if isinstance(shape, GrowingShape):
        numbers = shape.top_k, shape.depth, shape.size
        grown = shape.top_k**2 * shape.depth
        return min(numbers) >= 1 and shape.size <= MAX_NODES and grown <= MAX_GROWN
    if isinstance(shape, FixedShape):
        is_right = all(type(width) is int and width >= 1 for width in shape.widths)
        return (
            is_right
            and 1 <= len(shape.widths) <= MAX_NODES
            and sum(accumulate(shape.widths, mul)) <= MAX_NODES
        )
    return True


def expect(is_right: bool, words: str, found: Any) -> None:
    """ValueError, with ``words`` and what was ``found``, unless something ``is_right``."""
    if not is_right:
        raise ValueError(f"{words}, not {short(found)}")


def short(value: Any) -> str:
    """A value in a message: in one line, and not long."""
    return f"{' '.join(repr(value).split()):.60}"
