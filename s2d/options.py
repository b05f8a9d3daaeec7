"""What can be asked for: ``Options``. A default is filled in once, from the draft's config.json.

A method is a name for a way to draft:

    ar          no draft: plain, autoregressive decoding
    sd          one exit, a chain
    mcsd        one exit, a tree like 4,2,2,1
    s2d         sorted exits, a chain
    s2d-tree    sorted exits, a growing tree

Exits and trees that are given take the place of the method's: ``sd`` with a ``tree`` drafts it.

Where each part of the method is from:

    part                        from                          option that changes it
    sorted exits, thresholds    S2D (arXiv 2407.01955)        exits, thresholds
    chain of a fixed length     S2D, section 3                draft_length, with stop=0
    growing tree                S2D's code, after EAGLE-2     method="s2d-tree", tree
    rejection sampling          S2D, after 2302.01318         rule="rejection"
    trees of fixed widths       MCSD (arXiv 2401.06706)       method="mcsd", tree
    roots from the target       improved MCSD (2409.10644)    init="target"
    decision model              improved MCSD                 decision
    mask built once, sliced     improved MCSD                 always
    shared noise                ours, after 2408.07978        rule="noise", the default: one seed
                                                              gives one text, whatever drafts
    children by q / sqrt(e)     ours, measured                with rule="noise"
    stop by path probability    ours                          stop; 0 switches it off
    exit 0, a table of n-grams  ours, after prompt lookup     exits with 0; alone without a draft;
                                and REST (2311.08252)         datastore

The setting of the S2D paper is ``rule="rejection", stop=0`` (on the command line ``--paper``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from .model import Llama
from .sampling import warp
from .tree import FixedShape, GrowingShape, Shape

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
MAX_NODES = 1024  # of a tree: a mask takes this number squared
MCSD_TREE = (4, 2, 2, 1)  # the k-config of arXiv 2401.06706
THRESHOLD = 0.5  # of an exit without a threshold in config.json: the published one
TABLE_THRESHOLD = 0.9  # of exit 0 before exits with layers, which know more; tuned on miniatures
# The numbers that an option may be.
RANGES = {
    "max_new_tokens": (1, inf),
    "temperature": (0, 1e38),
    "top_p": (1e-40, 1),
    "top_k": (0, inf),
    "seed": (0, inf),
    "stop": (0, 1),
    "draft_length": (1, MAX_NODES),
}


@dataclass(frozen=True)
class Drafting:
    """How a model drafts unless options say otherwise: what only a draft's config.json has.

    Attributes:
        exits: the numbers of layers after which it may predict (draft.py).
        thresholds: one per exit; a confidence above it is enough.
        length: of a chain.
        stop: of a chain, or of exit 0 alone; see ``Options``.
        tree: top_k, depth and size of a ``GrowingShape``.
    """

    exits: tuple[int, ...]
    thresholds: tuple[float, ...]
    length: int = 6
    stop: float = 0.0
    tree: tuple[int, int, int] = (10, 4, 60)


def drafting_of(model: Llama) -> Drafting:
    """How ``model`` drafts by default. A model without sorted exits drafts after its last layer."""
    return model.drafting or Drafting((model.config.num_hidden_layers,), (0.0,))


def default_thresholds(exits: Sequence[Any], known: dict[int, float] | None = None) -> tuple:
    """The ``known`` threshold of each exit, or THRESHOLD; the last exit always drafts."""
    return (*((known or {}).get(exit_, THRESHOLD) for exit_ in exits[:-1]), 0.0)


@dataclass(frozen=True)
class Options:
    """What is asked for. None stands for a default, which ``filled`` fills in.

    Attributes:
        method: one of METHODS. The default is ``s2d``; or ``s2d-tree`` if ``tree`` is given, or if
            exit 0 drafts alone and no ``draft_length`` is given.
        max_new_tokens: the answer ends after so many tokens, if not before.
        temperature: 0 is greedy.
        top_p: the share of the probability that nucleus sampling keeps; 1 keeps all tokens.
        top_k: the number of tokens that may be sampled; 0 keeps all.
        seed: of all random numbers.
        exits: the numbers of layers after which the draft may predict; 0 is the n-gram table. Any
            object with the members of ``draft.Exit`` may stand among them.
        thresholds: one per exit; a confidence above it is enough. The last exit always drafts.
        draft_length: tokens in a chain.
        tree: the children of each node, by level, such as (4, 2, 2, 1); or a ``tree.Shape``.
        stop: a probability. A path whose estimated probability is below it is not continued.
        rule: "noise" or "rejection" (see the table above), or an object with the members of
            ``rules.Rule``. At temperature 0 both names give the same text.
        init: "draft", or "target": the target proposes the first level (mcsd/roots.py).
        decision: a model that estimates where drafting pays (mcsd/decision.py).
        datastore: n-grams that exit 0 knows besides those of the text (ngram/datastore.py).
        stop_at: where an answer ends besides EOS, such as ``StopStrings(tokenizer, ["User:"])``; or
            an object of your own with ``begin`` and ``cut``.
    """

    method: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    exits: Sequence[Any] | None = None
    thresholds: Sequence[float] | None = None
    draft_length: int | None = None
    tree: Sequence[int] | Shape | None = None
    stop: float | None = None
    rule: Any = "noise"
    init: str = "draft"
    decision: Any = None
    datastore: Any = None
    stop_at: Any = None

    def __post_init__(self) -> None:
        """ValueError for what can never be run."""
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and low <= value <= high):
                raise ValueError(f"{name}: expected a number from {low} to {high}, got {value!r}")
        if self.method not in (None, *METHODS):
            raise ValueError(f"unknown method {self.method!r}; expected {', '.join(METHODS)}")
        if self.rule not in ("noise", "rejection") and not hasattr(self.rule, "verify"):
            raise ValueError(f"rule is 'noise', 'rejection' or a Rule, not {self.rule!r}")
        if self.init not in ("draft", "target"):
            raise ValueError(f"init is 'draft' or 'target', not {self.init!r}")
        if self.tree is not None and self.draft_length is not None:
            raise ValueError("a tree has its own depth; give tree or draft_length, not both")

    def filled(self, drafting: Drafting | None) -> "Options":
        """These options with all defaults filled in; ValueError for what cannot be run.

        ``drafting`` is the draft model's. Without one, exit 0 drafts alone.
        """
        if self.method == "ar":
            nothing = FixedShape(())
            return replace(self, exits=(), thresholds=(), tree=nothing, draft_length=None, stop=0.0)
        exits = self.exits
        if exits is not None:
            exits = tuple(int(each) if isinstance(each, Integral) else each for each in exits)
        table_alone = exits == (0,) or (exits is None and drafting is None)
        if table_alone or drafting is None:
            from .ngram.table import DRAFTING as drafting
        method = self.method
        if method is None:
            wants_tree = self.tree is not None or (table_alone and self.draft_length is None)
            method = "s2d-tree" if wants_tree else "s2d"
        if exits is None:
            exits = drafting.exits if method in ("s2d", "s2d-tree") else drafting.exits[-1:]
        thresholds = self.choose_thresholds(exits, drafting)
        shape = self.choose_shape(method, drafting)
        stop = self.stop
        if stop is None and self.decision is not None:
            stop = self.decision.threshold
        elif stop is None:
            is_chain = isinstance(shape, FixedShape) and max(shape.widths) == 1
            stop = drafting.stop if is_chain or table_alone else 0.0
        chosen = {"method": method, "exits": exits, "thresholds": thresholds, "stop": stop}
        return replace(self, tree=shape, draft_length=None, **chosen)

    def choose_thresholds(self, exits: tuple, drafting: Drafting) -> tuple[float, ...]:
        """A threshold for each of ``exits``: what is asked for, or what the draft has."""
        layers = [each if isinstance(each, int) else each.exit_layer for each in exits]
        if not exits or layers != sorted(set(layers)):
            raise ValueError(f"exits must increase, got {layers}")
        if self.thresholds is not None:
            if len(self.thresholds) != len(exits):
                raise ValueError(f"{len(exits)} exits, but {len(self.thresholds)} thresholds")
            return tuple(self.thresholds)
        known = dict(zip(drafting.exits, drafting.thresholds))
        if tuple(each for each in exits if each != 0) != drafting.exits:
            # A threshold of 0 hides the exits after it. It is right for the draft's last exit only.
            known = {each: threshold for each, threshold in known.items() if threshold > 0}
        return default_thresholds(exits, {0: TABLE_THRESHOLD} | known)

    def choose_shape(self, method: str, drafting: Drafting) -> Shape:
        """The shape that is asked for, or the method's; ValueError if it is empty or too large."""
        tree = self.tree
        if tree is None and self.draft_length is None:
            tree = {"mcsd": MCSD_TREE, "s2d-tree": GrowingShape(*drafting.tree)}.get(method)
        if tree is None:
            tree = (1,) * int(self.draft_length or drafting.length)
        shape = tree if isinstance(tree, Shape) else FixedShape(tuple(tree))
        widths = [shape.width(depth) for depth in range(shape.depth)]
        if not widths or min(widths) < 1 or shape.capacity > MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, which {tree} has not")
        return shape

    @property
    def shape(self) -> Shape:
        """Of the trees, also of chains, once the options are filled in."""
        return self.tree

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from.

        Not for temperature 0, at which nothing is drawn.
        """
        return warp(logits, self.temperature, self.top_p, self.top_k)
