"""What can be asked for: ``Options``. A default is filled in once, from the draft's config.json.

A method is a name for a way to draft:

    ar          no draft: plain, autoregressive decoding
    sd          one exit, a chain
    mcsd        one exit, a tree like 4,2,2,1
    s2d         sorted exits, a chain
    s2d-tree    sorted exits, a growing tree

A method is a default: exits and trees that are given take the place of the method's. For example,
``sd`` with ``tree=(4, 2)`` drafts a tree from one exit, as ``mcsd`` does.

Where each part of the method is from:

    part                        from                          option that changes it
    sorted exits, thresholds    S2D (arXiv 2407.01955)        exits, thresholds
    chain of a fixed length     S2D, section 3                draft_length, with stop=0
    growing tree                S2D's code, after EAGLE-2     method="s2d-tree", tree
    rejection sampling          S2D, after 2302.01318         rule="rejection"
    trees of fixed widths       MCSD (arXiv 2401.06706)       method="mcsd", tree
    roots from the target       improved MCSD (2409.10644)    init="target"
    decision model              improved MCSD                 decision
    one mask, grown and sliced  improved MCSD                 always
    shared noise                ours, after 2408.07978        rule="noise", the default: one seed
                                                              gives one text, whatever drafts
    children by q / sqrt(e)     ours, measured                with rule="noise"
    stop by path probability    ours                          stop; 0 switches it off
    exit 0, a table of n-grams  ours, after prompt lookup     exits with 0; alone without a draft;
                                and REST (2311.08252)         datastore

The setting of the S2D paper is ``rule="rejection", stop=0`` (on the command line ``--paper``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from math import inf
from numbers import Integral, Real
from operator import index
from typing import Any

from torch import Tensor

from .draft import Exit
from .model import Drafting, LlamaConfig
from .rules import Rule
from .sampling import warp
from .tree import FixedShape, GrowingShape, Shape

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
MAX_NODES = 1024  # of a tree: a mask takes this number squared
MAX_GROWN = 8192  # of a growing tree before it is cut: as many bytes, squared
MCSD_TREE = (4, 2, 2, 1)  # the k-config of arXiv 2401.06706
THRESHOLD = 0.5  # of an exit without a threshold in config.json: the published one
# Exit 0 before exits with layers, which know more: tuned on miniatures (end of bench/README.md).
NGRAM_THRESHOLD = 0.9
# Exit 0 alone: tuned on SmolLM2-135M with its datastore (end of bench/README.md).
NGRAM_ALONE = Drafting(exits=(0,), thresholds=(0.0,), length=4, stop=0.03, tree=(3, 5, 5))
# The numbers that an option may be: of which kind, from and up to what, and how a message says it.
RANGES = {
    "max_new_tokens": (Integral, 1, inf, "a whole number from 1"),
    "temperature": (Real, 0, 1e6, "a number from 0"),
    "top_p": (Real, 1e-6, 1, "a number above 0, up to 1"),
    "top_k": (Integral, 0, inf, "a whole number from 0"),
    "seed": (Integral, 0, inf, "a whole number from 0"),
    "stop": (Real, 0, 1, "a number from 0 to 1"),
    "draft_length": (Integral, 1, MAX_NODES, f"a whole number from 1 to {MAX_NODES}"),
}
OPTIONAL = ("stop", "draft_length")  # of these, None stands for a default


def is_object(value: Any, protocol: type) -> bool:
    """Whether ``value`` has the members of a ``protocol``, and is not a class that has them."""
    return isinstance(value, protocol) and not isinstance(value, type)


def default_thresholds(count: int) -> tuple[float, ...]:
    """Thresholds of so many exits; the last one always drafts."""
    return (THRESHOLD,) * (count - 1) + (0.0,)


def default_drafting(config: LlamaConfig | None) -> Drafting:
    """How the draft model of a ``config`` drafts by default; None stands for exit 0 alone.

    A model without sorted exits drafts after its last layer.
    """
    if config is None:
        return NGRAM_ALONE
    return config.drafting or Drafting(exits=(config.num_hidden_layers,), thresholds=(0.0,))


@dataclass(frozen=True)
class Options:
    """What is asked for. ``filled`` fills in the method, exits, thresholds, tree and stop.

    Attributes:
        method: one of METHODS. It says which exits draft, and what shape the trees have, if
            ``exits``, ``tree`` and ``draft_length`` do not say it. The default is ``s2d``. If exit
            0 drafts alone, it is ``s2d-tree``, unless ``draft_length`` asks for a chain.
        max_new_tokens: the answer ends after so many tokens, if not before.
        temperature: 0 is greedy.
        top_p: the share of the probability that nucleus sampling keeps; 1 keeps all tokens.
        top_k: the number of tokens that may be sampled; 0 keeps all.
        seed: of all random numbers.
        exits: the numbers of layers after which the draft may predict, in ascending order; 0 is the
            n-gram table. Any object with the members of ``draft.Exit`` may stand among them.
        thresholds: one per exit; a confidence above it is enough. The last exit always drafts.
        draft_length: tokens in a chain.
        tree: the children of each node, by level, such as (4, 2, 2, 1); or an object with the
            members of ``tree.Shape``.
        stop: a probability. A path whose estimated probability is below it is not continued.
        rule: "noise" or "rejection" (see the table above), or an object with the members of
            ``rules.Rule``. At temperature 0 both names are one rule, except with ``init="target"``.
        init: "draft", or "target": the target proposes the first level (mcsd/roots.py).
        decision: a model that estimates where drafting pays (mcsd/decision.py).
        datastore: n-grams that exit 0 knows besides those of the text (ngram/datastore.py).
        stop_at: where an answer ends besides EOS, such as ``StopStrings(tokenizer, ["User:"])``; or
            an object of your own with ``begin`` and ``cut``, as it has.
    """

    method: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    exits: Sequence[int | Exit] | None = None
    thresholds: Sequence[float] | None = None
    draft_length: int | None = None
    tree: Sequence[int] | Shape | None = None
    stop: float | None = None
    rule: str | Rule = "noise"
    init: str = "draft"
    decision: Any = None
    datastore: Any = None
    stop_at: Any = None

    def __post_init__(self) -> None:
        """ValueError for what can never be run."""
        for name, (kind, low, high, words) in RANGES.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if not isinstance(value, kind) or not low <= value <= high:
                raise ValueError(f"{name}: expected {words}, got {value!r}")
            # Small numbers of NumPy would overflow.
            object.__setattr__(self, name, int(value) if kind is Integral else float(value))
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"temperature: expected 0, or at least 1e-6, got {self.temperature}")
        if self.method not in (None, *METHODS):
            raise ValueError(f"unknown method {self.method!r}; expected {', '.join(METHODS)}")
        if self.rule not in ("noise", "rejection") and not is_object(self.rule, Rule):
            raise ValueError(f"rule is 'noise', 'rejection' or a Rule, not {self.rule!r}")
        if self.init not in ("draft", "target"):
            raise ValueError(f"init is 'draft' or 'target', not {self.init!r}")
        if self.tree is not None and self.draft_length is not None:
            raise ValueError("a tree has its own depth; give tree or draft_length, not both")
        for name in ("exits", "thresholds"):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "__len__"):
                raise ValueError(f"{name}: expected a list, got {value!r}")
        for each in () if self.exits is None else self.exits:
            if not isinstance(each, Integral) and not is_object(each, Exit):
                raise ValueError(f"exits are numbers of layers or Exits, not {each!r}")
        for each in () if self.thresholds is None else self.thresholds:
            if not isinstance(each, Real) or not each >= 0:
                raise ValueError(f"thresholds are numbers from 0, not {each!r}")
        if self.stop_at is not None and not hasattr(self.stop_at, "begin"):
            raise ValueError(f"stop_at is StopStrings(tokenizer, texts), not {self.stop_at!r}")

    def filled(self, config: LlamaConfig | None) -> "Options":
        """These options with all defaults filled in; ValueError for what cannot be run.

        ``config`` is the draft model's. Without one, exit 0 drafts alone.
        """
        if self.decision is not None and not hasattr(self.decision, "estimate"):
            raise ValueError(f"a decision model is of load_decision, not {self.decision!r}")
        if self.datastore is not None and not hasattr(self.datastore, "followers"):
            raise ValueError(f"a datastore is of load_datastore, not {self.datastore!r}")
        if self.method == "ar":
            nothing = {"exits": (), "thresholds": (), "tree": FixedShape(()), "stop": 0.0}
            return replace(self, **nothing, draft_length=None, init="draft", decision=None)
        exits = self.exits
        if exits is not None:
            exits = tuple(int(each) if isinstance(each, Integral) else each for each in exits)
        alone = exits == (0,) or (exits is None and config is None)  # exit 0
        drafting = default_drafting(None if alone else config)
        method = self.method
        if method is None:
            method = "s2d-tree" if alone and self.draft_length is None else "s2d"
        if exits is None:
            exits = drafting.exits if method in ("s2d", "s2d-tree") else drafting.exits[-1:]
        thresholds = self.choose_thresholds(exits, drafting)
        shape = self.choose_shape(method, drafting)
        stop = self.choose_stop(shape, drafting, alone)
        chosen = {"method": method, "exits": exits, "thresholds": thresholds, "stop": stop}
        return replace(self, tree=shape, draft_length=None, **chosen)

    def choose_thresholds(
        self, exits: tuple[int | Exit, ...], drafting: Drafting
    ) -> tuple[float, ...]:
        """A threshold for each of ``exits``: what is asked for, or what the draft has."""
        layers = [each for each in exits if isinstance(each, int)]
        if not exits or layers != sorted(set(layers)):
            raise ValueError(f"exits must increase, got {layers}")
        if self.thresholds is not None:
            if len(self.thresholds) != len(exits):
                raise ValueError(f"{len(exits)} exits, but {len(self.thresholds)} thresholds")
            return tuple(self.thresholds)
        if exits == drafting.exits:
            return drafting.thresholds
        # A threshold of 0, as of a draft's last exit, would hide exits that are given after it.
        own = zip(drafting.exits, drafting.thresholds)
        known = {0: NGRAM_THRESHOLD} | {each: number for each, number in own if number > 0}
        thresholds = []
        for each in exits[:-1]:
            if not isinstance(each, int):
                raise ValueError(f"no threshold is known for the exit {each!r}: give thresholds")
            thresholds.append(known.get(each, THRESHOLD))
        return (*thresholds, 0.0)  # the last exit always drafts

    def choose_shape(self, method: str, drafting: Drafting) -> Shape:
        """The shape that is asked for, or the method's; ValueError if it is empty or too large."""
        tree = self.tree
        if tree is None and self.draft_length is not None:
            tree = (1,) * self.draft_length
        elif tree is None and method == "mcsd":
            tree = MCSD_TREE
        elif tree is None and method == "s2d-tree":
            tree = GrowingShape(*drafting.tree)
        elif tree is None:
            tree = (1,) * drafting.length
        try:
            shape = tree if is_object(tree, Shape) else FixedShape(tuple(map(index, tree)))
        except TypeError:
            raise ValueError(f"a tree is a list of widths or a Shape, not {tree!r}") from None
        widths = [shape.width(depth) for depth in range(shape.depth)]
        if not widths or min(widths) < 1 or shape.capacity > MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, which {tree} has not")
        if isinstance(shape, GrowingShape) and shape.top_k**2 * shape.depth > MAX_GROWN:
            raise ValueError(f"a growing tree grows to at most {MAX_GROWN} nodes, unlike {shape}")
        return shape

    def choose_stop(self, shape: Shape, drafting: Drafting, alone: bool) -> float:
        """The probability that is asked for, or the decision model's, or the draft's."""
        if self.stop is not None:
            return self.stop
        if self.decision is not None:
            return self.decision.threshold
        is_chain = isinstance(shape, FixedShape) and max(shape.widths) == 1
        return drafting.stop if is_chain or alone else 0.0

    @property
    def shape(self) -> Shape:
        """Of the trees, also of chains, once the options are filled in."""
        return self.tree

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from.

        At temperature 0 nothing is drawn. It then returns the probabilities at temperature 1.
        """
        if self.temperature == 0:
            return warp(logits, temperature=1.0)
        return warp(logits, self.temperature, self.top_p, self.top_k)


def make_options(**given: Any) -> Options:
    """Options by their names; ValueError with the nearest name for one that there is not."""
    names = [field.name for field in fields(Options)]
    for name in given:
        if name not in names:
            nearest = get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
            raise ValueError(f"unknown option {name!r}; {hint}")
    return Options(**given)
