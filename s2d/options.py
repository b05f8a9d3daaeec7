"""What a caller may say, ``Options``, and what is decided then, a ``Plan``.

A method is a name for a way to draft:

    ar          no draft: plain, autoregressive decoding
    sd          one exit, a chain
    mcsd        one exit, a tree like 4,2,2,1
    s2d         sorted exits, a chain
    s2d-tree    sorted exits, a growing tree

It only stands for defaults: exits and trees that are given take the place of the method's. For
example, ``sd`` with ``tree=(4, 2)`` drafts a tree from one exit, as ``mcsd`` does. README.md says
where each part of the method is from. The setting of the S2D paper is ``rule="rejection", stop=0``
(on the command line ``--paper``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from numbers import Integral, Real
from operator import index
from typing import Any

from torch import Tensor

from .model import Drafting, LlamaConfig
from .own import MAX_NODES, check_shape, short
from .rules import Exit, Rule
from .sampling import warp
from .tree import FixedShape, GrowingShape, Shape

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
MCSD_TREE = (4, 2, 2, 1)  # the k-config of arXiv 2401.06706
THRESHOLD = 0.5  # of an exit without a threshold in config.json: the published one
# Exit 0 before exits with layers, which know more: tuned on miniatures (end of bench/README.md).
EXIT_0_THRESHOLD = 0.9
# Exit 0 alone: tuned on SmolLM2-135M with its datastore (end of bench/README.md).
EXIT_0_ALONE = Drafting(exits=(0,), thresholds=(0.0,), length=4, stop=0.03, tree=(3, 5, 5))


@dataclass(frozen=True)
class Plan:
    """What is decided, from what was asked for and from the draft's config.json."""

    options: "Options"  # what was asked for
    method: str
    exits: tuple[int | Exit, ...]  # in the order in which they are asked; none: no draft
    thresholds: tuple[float, ...]  # one for each exit
    shape: Shape  # of the trees; a chain is a tree, too
    stop: float  # a path that is less probable gets no children

    def as_dict(self) -> dict[str, Any]:
        """What was decided, in the place of what was asked, by the names of the options."""
        decided = {"method": self.method, "exits": self.exits, "thresholds": self.thresholds}
        return vars(self.options) | decided | {"tree": self.shape, "stop": self.stop}


@dataclass(frozen=True)
class Options:
    """What is asked for. Where it is None, ``plan`` decides."""

    # One of METHODS. The default is "s2d"; if exit 0 drafts alone, it is "s2d-tree", unless
    # ``draft_length`` asks for a chain.
    method: str | None = None
    max_new_tokens: int = 128  # the answer ends after so many tokens, if not before
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # the share of the probability that nucleus sampling keeps; 1 keeps all
    top_k: int = 0  # the number of tokens that may be sampled; 0 keeps all
    seed: int = 0  # of all random numbers
    # The numbers of layers after which the draft may predict, in ascending order; 0 is the n-gram
    # table. Any object with the members of ``rules.Exit`` may stand among them.
    exits: Sequence[int | Exit] | None = None
    # One per exit; a confidence above it is enough. The last exit always drafts, whatever its
    # threshold is.
    thresholds: Sequence[float] | None = None
    draft_length: int | None = None  # the most tokens of a chain
    # The children of each node, by level, such as (4, 2, 2, 1); or an object with the members of
    # ``tree.Shape``.
    tree: Sequence[int] | Shape | None = None
    stop: float | None = None  # a path is not continued if its estimated probability is lower
    # "noise" or "rejection" (rules.py), or an object with the members of ``rules.Rule``. At
    # temperature 0 nothing is drawn, and both names are one rule.
    rule: str | Rule = "noise"
    init: str = "draft"  # what proposes the first level: it, or the "target" (mcsd/roots.py)
    decision: Any = None  # a model that estimates where drafting pays (mcsd/decision.py)
    datastore: Any = None  # n-grams of other texts, for exit 0 (ngram/datastore.py)
    # Where an answer ends besides EOS, such as ``StopStrings(tokenizer, ["User:"])``; or an object
    # of your own with ``begin`` and ``cut``, as it has.
    stop_at: Any = None

    def plan(self, config: LlamaConfig | None) -> Plan:
        """What is decided; ValueError for what cannot be run.

        ``config`` is the draft model's. Without one, exit 0 drafts alone.
        """
        for name, members in MEMBERS.items():
            value = getattr(self, name)
            has_all = all(hasattr(value, member) for member in members)
            if value is not None and (isinstance(value, type) or not has_all):
                words = ", ".join(members)
                raise ValueError(f"{name} is an object with {words}, not {short(value)}")
        if self.method == "ar":
            alone = replace(self, init="draft", decision=None)
            return Plan(alone, "ar", exits=(), thresholds=(), shape=FixedShape(()), stop=0.0)
        exit_0_alone = self.exits == (0,) or (self.exits is None and config is None)
        drafting = default_drafting(None if exit_0_alone else config)
        method = self.method
        if method is None:
            method = "s2d-tree" if exit_0_alone and self.draft_length is None else "s2d"
        exits = drafting.exits if method in ("s2d", "s2d-tree") else drafting.exits[-1:]
        if self.exits is not None:
            exits = tuple(int(each) if isinstance(each, Integral) else each for each in self.exits)
        numbers = [each for each in exits if isinstance(each, int)]
        if not exits or numbers != sorted(set(numbers)):
            raise ValueError(f"exits: expected increasing numbers of layers, not {numbers}")
        layers = 0 if config is None else config.num_hidden_layers
        if numbers and not 0 <= numbers[0] <= numbers[-1] <= layers:
            draft = f"the draft has {layers} layers" if layers else "there is no draft model"
            raise ValueError(f"exits {numbers}: {draft}")
        if self.datastore is not None and 0 not in exits:
            raise ValueError("a datastore is what exit 0 reads, which is not among the exits")
        thresholds = self.choose_thresholds(exits, drafting)
        shape = self.choose_shape(method, drafting)
        check_shape(shape)
        is_chain = isinstance(shape, FixedShape) and max(shape.widths) == 1
        stop = drafting.stop if is_chain or exit_0_alone else 0.0
        if self.decision is not None:
            stop = self.decision.threshold
        if self.stop is not None:
            stop = self.stop
        return Plan(self, method, exits, thresholds, shape, stop)

    def choose_thresholds(
        self, exits: tuple[int | Exit, ...], drafting: Drafting
    ) -> tuple[float, ...]:
        """A threshold for each of ``exits``: what is asked for, or what the draft has."""
        if self.thresholds is not None:
            if len(self.thresholds) != len(exits):
                raise ValueError(f"{len(exits)} exits, but {len(self.thresholds)} thresholds")
            return self.thresholds
        if exits == drafting.exits:
            return drafting.thresholds
        # A last exit has 0. No exit that is given after it would ever be asked.
        own = zip(drafting.exits, drafting.thresholds)
        known = {0: EXIT_0_THRESHOLD} | {each: number for each, number in own if number > 0}
        thresholds = []
        for each in exits[:-1]:
            if not isinstance(each, int):
                raise ValueError(f"no threshold is known for {short(each)}: give thresholds")
            thresholds.append(known.get(each, THRESHOLD))
        return (*thresholds, 0.0)  # the last exit always drafts

    def choose_shape(self, method: str, drafting: Drafting) -> Shape:
        """The shape that is asked for, or the method's."""
        if is_object(self.tree, Shape):
            return self.tree
        if self.tree is not None:
            try:
                return FixedShape(tuple(map(index, islice(self.tree, MAX_NODES + 1))))
            except TypeError:
                words = "a tree is a list of widths or a Shape"
                raise ValueError(f"{words}, not {short(self.tree)}") from None
        if self.draft_length is None and method == "mcsd":
            return FixedShape(MCSD_TREE)
        if self.draft_length is None and method == "s2d-tree":
            return GrowingShape(*drafting.tree)
        return FixedShape((1,) * (self.draft_length or drafting.length))

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from.

        At temperature 0 nothing is drawn. It then returns the probabilities at temperature 1.
        """
        if self.temperature == 0:
            return warp(logits, temperature=1.0)
        return warp(logits, self.temperature, self.top_p, self.top_k)

    def __post_init__(self) -> None:
        """ValueError for what can never be run."""
        for name, (kind, low, high) in RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("stop", "draft_length"):
                continue
            if not isinstance(value, kind) or not low <= value <= high:
                noun = "a whole number" if kind is Integral else "a number"
                up_to = "" if high == inf else f" up to {high:g}"
                raise ValueError(f"{name}: expected {noun} from {low:g}{up_to}, not {short(value)}")
            # Small numbers of NumPy would overflow.
            object.__setattr__(self, name, int(value) if kind is Integral else float(value))
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"temperature: expected 0, or at least 1e-6, not {self.temperature}")
        if self.method not in (None, *METHODS):
            raise ValueError(f"unknown method {short(self.method)}; expected {', '.join(METHODS)}")
        if self.rule not in ("noise", "rejection") and not is_object(self.rule, Rule):
            raise ValueError(f"rule is 'noise', 'rejection' or a Rule, not {short(self.rule)}")
        if self.init not in ("draft", "target"):
            raise ValueError(f"init is 'draft' or 'target', not {short(self.init)}")
        if self.tree is not None and self.draft_length is not None:
            raise ValueError("tree: expected without draft_length, as a tree has its own depth")
        for name in ("exits", "thresholds"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, value if value is None else tuple(value))
            except TypeError:
                raise ValueError(f"{name}: expected a list, not {short(value)}") from None
        for each in self.exits or ():
            if not isinstance(each, Integral) and not is_object(each, Exit):
                raise ValueError(f"exits are numbers of layers or Exits, not {short(each)}")
        for each in self.thresholds or ():
            if not isinstance(each, Real) or not 0 <= each < inf:
                raise ValueError(f"thresholds: expected numbers from 0, not {short(each)}")


# The numbers that an option may be: of which kind, from and up to what.
RANGES = {
    "max_new_tokens": (Integral, 1, inf),
    "temperature": (Real, 0, 1e6),
    "top_p": (Real, 1e-6, 1),
    "top_k": (Integral, 0, inf),
    "seed": (Integral, 0, inf),
    "stop": (Real, 0, 1),
    "draft_length": (Integral, 1, MAX_NODES),
}
# What an object has to have that is given for an option.
MEMBERS = {
    "stop_at": ("begin", "cut"),
    "decision": ("estimate", "threshold", "prepare_for"),
    "datastore": ("followers", "doubts"),
}


def is_object(value: Any, protocol: type) -> bool:
    """Whether ``value`` has the members of a ``protocol``, and is not a class that has them."""
    return isinstance(value, protocol) and not isinstance(value, type)


def default_drafting(config: LlamaConfig | None) -> Drafting:
    """How the draft model of a ``config`` drafts by default; None stands for exit 0 alone.

    A model without sorted exits drafts after its last layer.
    """
    if config is None:
        return EXIT_0_ALONE
    return config.drafting or Drafting(exits=(config.num_hidden_layers,), thresholds=(0.0,))
