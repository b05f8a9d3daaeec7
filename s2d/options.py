"""What can be asked for (``Options``), and what will be done (``Settings``), in one place.

A method is a name for a way to draft, a preset of exits and a shape:

    ar          no draft: plain, autoregressive decoding
    sd          one exit, a chain
    mcsd        one exit, a tree like 4,2,2,1
    s2d         sorted exits, a chain
    s2d-tree    sorted exits, a growing tree

Exits and shapes that are given take the preset's place: ``sd`` with ``tree`` drafts that tree.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from .draft import DecisionModel, Exit
from .model import Llama, LlamaConfig
from .rules import Rule
from .sampling import warp
from .tree import NO_NODES, FixedShape, GrowingShape, Shape

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
RULES = ("noise", "rejection")
MAX_NODES = 1024  # of a tree: a mask takes this number squared
MCSD_TREE = (4, 2, 2, 1)  # the k-config of arXiv 2401.06706
# Tokens that one of two models with the same tokenizer may have more, since vocabularies are padded
# for GPUs: 32,000 or 32,064 for Llama 2, 128,256 or 128,264 for Llama 3. The limit is llama.cpp's.
PADDING = 128
THRESHOLD = 0.5  # of an exit that has none of its own: the published one
TABLE_THRESHOLD = 0.9  # of exit 0 before exits with layers, which know more; tuned on miniatures


@dataclass(frozen=True)
class Drafting:
    """How a model drafts unless options say otherwise; in the same config.json as its LlamaConfig.

    Attributes:
        exits: the numbers of layers after which it may predict (draft.py).
        thresholds: one per exit, a confidence above it is enough.
        length: of a chain.
        stop: of a chain, or of exit 0 alone; see ``Options``.
        tree: top_k, depth and size of a ``GrowingShape``.
    """

    exits: tuple[int, ...]
    thresholds: tuple[float, ...]
    length: int = 6
    stop: float = 0.0
    tree: tuple[int, int, int] = (10, 4, 60)

    def within(self, layers: int) -> "Drafting":
        """How the first ``layers`` alone draft: from the exits before their end, and from there."""
        if layers >= self.exits[-1]:
            return self
        exits = tuple(exit_ for exit_ in self.exits if exit_ < layers)
        return replace(
            self, exits=(*exits, layers), thresholds=(*self.thresholds[: len(exits)], 0.0)
        )


def default_drafting(config: LlamaConfig) -> Drafting:
    """Of a model that was not trained to predict after fewer layers than it has."""
    exits = (config.num_hidden_layers,)
    return Drafting(exits, default_thresholds(exits))


def default_thresholds(exits: Sequence[int]) -> tuple[float, ...]:
    """THRESHOLD for every exit but the last, which always drafts."""
    return (THRESHOLD,) * (len(exits) - 1) + (0.0,)


def drafting_of(model: Llama) -> Drafting:
    """How ``model`` drafts by default."""
    return model.drafting or default_drafting(model.config)


class Ending(Protocol):
    """Where an answer ends besides EOS: ``StopStrings``, or one of your own."""

    def begin(self) -> Callable[[int], bool]:
        """What one answer asks about each of its tokens: whether it ends with it."""

    def cut(self, text: str) -> str:
        """What of the ``text`` of an answer's tokens belongs to the answer."""


# How exit 0 drafts alone; tuned on SmolLM2-135M, 48 Spec-Bench prompts.
TABLE_ALONE = Drafting(exits=(0,), thresholds=(0.0,), length=4, stop=0.03, tree=(6, 7, 7))


@dataclass(frozen=True)
class Options:
    """What is asked for. None stands for a default, which ``resolve`` fills in.

    Attributes:
        method: one of METHODS. By default ``s2d``; but ``s2d-tree`` if ``tree`` is given, or if
            exit 0 drafts alone and no ``draft_length`` is given.
        max_new_tokens: the answer ends there, if not before.
        temperature: 0 is greedy.
        top_p: the share of the probability that nucleus sampling keeps; 1 keeps all tokens.
        top_k: the number of tokens that may be sampled; 0 keeps all.
        seed: of all random numbers.
        exits: the numbers of layers after which the draft may predict; 0 is the n-gram table. Any
            object with the members of ``draft.Exit`` may stand among them.
        thresholds: one per exit, a confidence above it is enough. The last exit always drafts,
            whatever its own is.
        draft_length: tokens in a chain.
        tree: children of each node, by level, such as (4, 2, 2, 1), or a ``tree.Shape``.
        init: "target" gives each tree its first level from the target (roots.py).
        stop: a probability. A path whose estimated probability is below it is not continued.
        decision: a decision model, which estimates these probabilities (decision.py).
        rule: "noise": draft and target share their noise, so that one seed gives one text.
            "rejection": rejection sampling, as in the papers. Or an object with the members of
            ``rules.Rule``. At temperature 0 both names give the same text, unless ``init`` is
            "target".
        datastore: what exit 0 knows besides the text (ngram/datastore.py).
        stop_at: where an answer ends besides EOS, such as ``StopStrings(tokenizer, ["User:"])``.
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
    init: str = "draft"
    stop: float | None = None
    decision: DecisionModel | None = None
    rule: str | Rule = "noise"
    datastore: Any = None  # an ngram.table.Table
    stop_at: Ending | None = None


@dataclass(frozen=True)
class Settings:
    """What will be done: ``Options`` with nothing left to decide.

    Attributes:
        shape: of the trees, also of chains.
    """

    method: str
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    exits: tuple[int | Exit, ...]
    thresholds: tuple[float, ...]
    shape: Shape
    init: str
    stop: float
    decision: DecisionModel | None
    rule: str | Rule
    datastore: Any
    stop_at: Ending | None

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from.

        Not for temperature 0, at which nothing is drawn.
        """
        return warp(logits, self.temperature, self.top_p, self.top_k)


def resolve(
    options: Options,
    target_config: LlamaConfig,
    draft_config: LlamaConfig | None = None,
    drafting: Drafting | None = None,
) -> Settings:
    """``options`` with all defaults filled in. Raises ValueError for what cannot be run.

    Args:
        target_config: of the target.
        draft_config, drafting: of the draft model, and how it drafts by default; without one,
            exit 0 drafts alone, or the exits that are given as objects.
    """
    if options.method is not None and options.method not in METHODS:
        raise ValueError(f"unknown method {options.method!r}; expected {', '.join(METHODS)}")
    if options.init not in ("draft", "target"):
        raise ValueError(f"init is 'draft' or 'target', not {options.init!r}")
    is_rule = hasattr(options.rule, "verify") and not isinstance(options.rule, type)
    if options.rule not in RULES and not is_rule:
        raise ValueError(f"rule is 'noise', 'rejection' or a Rule, not {options.rule!r}")
    if options.init == "target" and not isinstance(options.rule, str):
        raise ValueError("init='target' goes with rule='noise' or 'rejection'")
    for name, member in (("decision", "judge"), ("datastore", "followers")):
        given = getattr(options, name)
        if given is not None and not hasattr(given, member):
            raise ValueError(f"{name} is an object that was loaded from its file, not {given!r}")
    if options.stop_at is not None and not hasattr(options.stop_at, "begin"):
        raise ValueError(f"stop_at is StopStrings(tokenizer, [...]), not {options.stop_at!r}")
    temperature = check_number("temperature", options.temperature, 0, 1e38)
    if temperature != 0:
        check_number("temperature, if not 0", temperature, 1e-6, 1e38)
    plain = Settings(
        method="ar",
        max_new_tokens=check_whole("max_new_tokens", options.max_new_tokens, 1),
        temperature=temperature,
        top_p=check_number("top_p", options.top_p, 1e-40, 1),
        top_k=check_whole("top_k", options.top_k, 0),
        seed=check_whole("seed", options.seed, 0),
        exits=(),
        thresholds=(),
        shape=NO_NODES,
        init="draft",
        stop=0.0,
        decision=None,
        rule=options.rule,
        datastore=None,
        stop_at=options.stop_at,
    )
    if options.method == "ar":
        return plain
    return add_draft(
        plain,
        options,
        vocab_size=target_config.vocab_size,
        draft_config=draft_config,
        drafting=drafting,
    )


def add_draft(
    plain: Settings,
    options: Options,
    vocab_size: int,
    draft_config: LlamaConfig | None,
    drafting: Drafting | None,
) -> Settings:
    """The settings of ``plain`` decoding, with a draft as ``options`` ask for."""
    if draft_config is not None and not same_vocabulary(draft_config, vocab_size):
        sizes = f"{draft_config.vocab_size} and {vocab_size} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")
    asked = None if options.exits is None else as_list("exits", options.exits)
    table_alone = asked == [0] or (asked is None and draft_config is None)
    if table_alone or drafting is None:  # None: for exits of the caller's own, without a draft
        drafting = TABLE_ALONE
    several = options.method not in ("sd", "mcsd")
    exits = resolve_exits(asked, several, drafting, draft_config)
    method = options.method
    if method is None:
        tree_is_best = table_alone and options.draft_length is None
        method = "s2d-tree" if options.tree is not None or tree_is_best else "s2d"
    shape = resolve_shape(options, method, drafting, vocab_size)
    with_layers = [exit_ for exit_ in exits if isinstance(exit_, int) and exit_ > 0]
    if options.decision is not None and len(with_layers) < len(exits):
        raise ValueError("a decision model judges exits with layers; exit 0 has none")
    is_chain = isinstance(shape, FixedShape) and max(shape.widths) == 1
    if options.stop is not None:
        stop = check_number("stop", options.stop, 0, 1)
    elif options.decision is not None:
        stop = options.decision.threshold
    else:
        stop = drafting.stop if is_chain or table_alone else 0.0
    return replace(
        plain,
        method=method,
        exits=exits,
        thresholds=resolve_thresholds(options, exits, drafting),
        shape=shape,
        init=options.init,
        stop=stop,
        decision=options.decision,
        datastore=options.datastore,
    )


def same_vocabulary(draft_config: LlamaConfig, vocab_size: int) -> bool:
    """Whether a draft's vocabulary may be that of a target with ``vocab_size`` tokens.

    What only one of them has is never drafted, and the target may write it nevertheless.
    """
    return abs(draft_config.vocab_size - vocab_size) <= PADDING


def resolve_exits(
    asked: list[int | Exit] | None,
    several: bool,
    drafting: Drafting,
    draft_config: LlamaConfig | None,
) -> tuple[int | Exit, ...]:
    if asked is None:
        return drafting.exits if several else drafting.exits[-1:]
    depth = 0 if draft_config is None else draft_config.num_hidden_layers
    exits: list[int | Exit] = []
    for exit_ in asked:
        if isinstance(exit_, type) or not hasattr(exit_, "predict"):
            exit_ = check_whole(f"exits of {depth} draft layers", exit_, 0, depth)
        exits.append(exit_)
    layers = [exit_ if isinstance(exit_, int) else exit_.exit_layer for exit_ in exits]
    if not exits or layers != sorted(set(layers)):
        raise ValueError(f"exits must increase, got {layers}")
    return tuple(exits)


def resolve_thresholds(
    options: Options, exits: tuple[int | Exit, ...], drafting: Drafting
) -> tuple[float, ...]:
    if options.thresholds is not None:
        asked = as_list("thresholds", options.thresholds)
        if len(asked) != len(exits):
            raise ValueError(f"{len(exits)} exits, but {len(asked)} thresholds")
        return tuple(check_number("thresholds", each, 0, 1) for each in asked)
    trained = dict(zip(drafting.exits, drafting.thresholds))
    as_trained = tuple(exit_ for exit_ in exits if exit_ != 0) == drafting.exits
    thresholds = []
    for exit_ in exits[:-1]:
        if exit_ == 0:
            threshold = TABLE_THRESHOLD
        elif not isinstance(exit_, int):
            threshold = THRESHOLD
        else:
            threshold = trained.get(exit_, THRESHOLD)
            # After an exit with a threshold of 0 no deeper one is reached. The last exit that was
            # trained has that threshold; it gets another one if deeper exits are asked for.
            if threshold == 0 and not as_trained:
                threshold = THRESHOLD
        thresholds.append(threshold)
    return (*thresholds, 0.0)


def resolve_shape(options: Options, method: str, drafting: Drafting, vocab_size: int) -> Shape:
    if options.tree is not None and options.draft_length is not None:
        raise ValueError("a tree has its own depth; give tree or draft_length, not both")
    tree = options.tree
    if isinstance(tree, Shape) and type(tree) not in (FixedShape, GrowingShape):
        return tree  # the caller's own
    if tree is None and options.draft_length is None and method == "mcsd":
        tree = MCSD_TREE
    elif tree is None and options.draft_length is None and method == "s2d-tree":
        tree = GrowingShape(*drafting.tree)
    elif tree is None:
        length = drafting.length if options.draft_length is None else options.draft_length
        tree = (1,) * check_whole("draft_length", length, 1, MAX_NODES)
    if isinstance(tree, GrowingShape):
        sizes = [check_whole("tree", each, 1, MAX_NODES) for each in astuple(tree)]
        shape: Shape = GrowingShape(*sizes)
    else:
        widths = as_list("tree", tree.widths if isinstance(tree, FixedShape) else tree)
        shape = FixedShape(tuple(check_whole("tree", each, 1, MAX_NODES) for each in widths))
    check_whole("levels of a tree", shape.depth, 1, MAX_NODES)
    check_whole("nodes of a tree", shape.capacity, 1, MAX_NODES)
    widest = max(shape.width(level) for level in range(shape.depth))
    check_whole("children of a node", widest, 1, vocab_size)
    return shape


def as_list(what: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{what}: expected a list, got {values!r}")
    return list(values)


def check_number(what: str, value: float, low: float, high: float) -> float:
    """``value`` as a float; ValueError if it is no number from ``low`` to ``high``."""
    try:
        inside = low <= value <= high
        number = float(value) if inside else 0.0
    except (TypeError, ValueError, RuntimeError):  # a text, None, an array or a tensor
        inside = False
    if not inside:
        raise ValueError(f"{what}: expected a number from {low} to {high}, got {value!r}")
    return number


def check_whole(what: str, value: int, low: int, high: int = 2**63 - 1) -> int:
    """As ``check_number``, but an int; 8.0 and NumPy's 8 are whole as well."""
    check_number(what, value, low, high)
    if int(value) != value:
        raise ValueError(f"{what}: expected a whole number from {low} to {high}, got {value!r}")
    return int(value)
