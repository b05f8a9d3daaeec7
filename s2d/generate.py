"""``generate``: names and numbers become a drafter, and the loop runs.

Every default and every refusal of an option is here. A method is a choice of objects: ``ar`` drafts
nothing; ``sd`` drafts a chain from one exit and ``s2d`` from sorted exits; ``mcsd`` and ``s2d-tree``
draft the same as trees.
"""

from collections.abc import Iterator

from .decode import Stats, Step, clock, decode
from .draft import NoDraft, SortedDraft, Table
from .model import Llama
from .ngram import Datastore, NGrams
from .sampling import Sampler, Sampling
from .tree import Dynamic, KConfig

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
TREE_METHODS = ("mcsd", "s2d-tree")
K_CONFIG = (4, 2, 2, 1)
LARGEST_TREE = 2048  # nodes drafted for one pass: masks take this number squared
SMALLEST_TEMPERATURE = 1e-6  # logits divided by less might not be finite; 0 is greedy
TABLE_THRESHOLD = 0.5  # of exit 0, in front of layers
TABLE_STOP = 0.1  # of exit 0 alone: a less probable path is not worth a row of the target's pass


class WITHOUT_LAYERS:
    """The config of a draft that is exit 0 alone."""

    num_hidden_layers, exit_layers, thresholds = 0, (0,), (0.0,)
    draft_length, draft_tree = 4, (6, 7, 7)


class Generation:
    """An answer in the making: iterating over it decodes, a Step at a time.

    ``tokens`` are the new ones so far, with EOS last if it was produced; ``stats`` is a Stats of the
    steps so far; ``exact`` tells whether the method is lossless.
    """

    def __init__(self, steps: Iterator[Step], exact: bool):
        self.steps, self.exact = steps, exact
        self.tokens: list[int] = []
        self.stats = Stats()

    def __iter__(self) -> Iterator[Step]:
        for step in self.steps:
            self.stats.add(step)
            self.tokens += step.tokens
            yield step

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.stats.seconds


def generate(target: Llama, tokens: list[int], draft=None, method="s2d", **options) -> Generation:
    """Continue ``tokens`` as ``target`` alone would; returns the finished Generation.

    ``options`` are those of ``start``.
    """
    generation = start(target, tokens, draft, method, **options)
    for _ in generation:
        pass
    return generation


def start(
    target: Llama,
    tokens: list[int],
    draft: Llama | None = None,
    method: str = "s2d",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    exits: list[int] | None = None,
    thresholds: list[float] | None = None,
    draft_length: int | None = None,
    tree: tuple[int, ...] | Dynamic | None = None,
    init: str = "draft",
    stop=None,
    replacement: bool = False,
    datastore: Datastore | None = None,
) -> Generation:
    """A Generation that continues ``tokens``, a list of ids, and has not begun.

    ``exits`` and ``thresholds`` (one for each exit, within 0..1; the last exit always drafts)
    default to the draft's config; "sd" and "mcsd" use the last exit only. Exit 0 drafts what
    followed the last tokens before, in the text and in a ``datastore`` (ngram.py); without a draft
    it is the only one. "sd" and "s2d" draft
    chains of ``draft_length`` tokens, "mcsd" and "s2d-tree" draft ``tree``: the numbers of children,
    level by level, such as (4, 2, 2, 1), or a ``Dynamic``. Defaults come from the draft's config,
    for "mcsd" it is K_CONFIG. Above T = 0 the children of a node are sampled, with or without
    ``replacement``; those of a Dynamic are always the likeliest. ``stop`` ends drafting early: a
    number, where the last exit's confidence is below it, or a decision model (extras/decision.py);
    for chains it defaults to the draft's config, and 0 never ends one.

    ``init`` "target" takes the first level of each tree from the target's last distribution
    (extras/roots.py). With several roots that is not lossless.

    Ends at EOS, after ``max_new_tokens`` or where the target's context is full. Raises ValueError
    for anything that cannot be run.
    """
    began = clock(target.device)
    check(target, tokens, max_new_tokens, temperature, top_p, seed)
    check_draft(target, draft, method, init, stop)
    if method == "ar":
        drafter = NoDraft(target.device)
    else:
        config = draft.config if draft else WITHOUT_LAYERS
        exits, thresholds = choose_exits(config, method, exits, thresholds)
        shape = choose_shape(target.config, draft, exits, method, draft_length, tree)
        floor, policy, table = choose_stop(config, exits, method, stop), None, None
        if callable(floor):
            from .extras.decision import PathStop

            floor, policy = 0.0, PathStop(floor)
        if exits[0] == 0:
            table = Table(NGrams(datastore), target.config.vocab_size, target.device, target.dtype)
        capacity = min(len(tokens) + max_new_tokens, target.config.max_position_embeddings)
        layers = draft if exits[-1] > 0 else None
        drafter = SortedDraft(layers, exits, thresholds, shape, capacity, floor, policy, table)
        if init == "target":
            from .extras.roots import TargetRoots

            drafter = TargetRoots(drafter)
    if target.mesh is not None:
        from .extras.parallel import FirstDecides

        drafter = FirstDecides(drafter, target.device)
    sampling = Sampling(temperature, top_p, replacement, Sampler(seed, target.device))
    steps = decode(target, tokens, drafter, sampling, max_new_tokens)
    generation = Generation(steps, drafter.exact)
    generation.stats.seconds = clock(target.device) - began  # of caches and masks; each step adds
    return generation


def check(target, tokens, max_new_tokens, temperature, top_p, seed):
    """Raise ValueError where ``target`` cannot continue ``tokens`` in this way."""
    context_size, vocab_size = target.config.max_position_embeddings, target.config.vocab_size
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"the prompt has ids outside the target's vocabulary of {vocab_size}")
    if len(tokens) >= context_size:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; the target's context of {context_size} is full"
        )
    if max_new_tokens < 1:
        raise ValueError(f"lengths must be at least 1, got max_new_tokens={max_new_tokens}")
    if not (temperature == 0.0 or SMALLEST_TEMPERATURE <= temperature < float("inf")):
        raise ValueError(
            f"temperature must be 0 or at least {SMALLEST_TEMPERATURE}, got {temperature}"
        )
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed}")


def check_draft(target, draft, method, init, stop):
    """Raise ValueError where ``method`` cannot draft for ``target`` with ``draft``."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; expected one of {', '.join(METHODS)}")
    if init not in ("draft", "target"):
        raise ValueError(f"init is 'draft' or 'target', got {init!r}")
    if stop is not None and not callable(stop) and not 0.0 <= stop <= 1.0:
        raise ValueError(f"stop is a confidence within 0..1, got {stop}")
    if method == "ar" or draft is None:
        return
    sizes = draft.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            "draft and target must share one vocabulary: "
            f"the draft has {sizes[0]} tokens, the target {sizes[1]}"
        )


def choose_shape(target_config, draft, exits, method, draft_length=None, tree=None):
    """The shape of tree a method drafts.

    Raises ValueError where the options fit neither the method nor the models.
    """
    config = draft.config if draft and exits[-1] > 0 else WITHOUT_LAYERS
    if tree is not None and method not in TREE_METHODS:
        names = " or ".join(map(repr, TREE_METHODS))
        raise ValueError(f"method {method!r} drafts no tree; use {names} for one")
    context_size = target_config.max_position_embeddings
    if method in TREE_METHODS:
        if draft_length is not None:
            raise ValueError(f"method {method!r} drafts a tree; give its shape, not a draft length")
        if tree is None:
            tree = K_CONFIG if method == "mcsd" else Dynamic(*config.draft_tree)
        shape = tree if isinstance(tree, Dynamic) else KConfig(tuple(tree))
    else:
        length = config.draft_length if draft_length is None else draft_length
        _check_size(length, length, context_size)  # before a shape of any length is built
        shape = KConfig((1,) * length)
    fixed = isinstance(shape, KConfig)
    numbers = shape.widths if fixed else (shape.top_k, shape.depth, shape.size)
    if min(numbers, default=0) < 1:
        raise ValueError(f"a draft needs whole numbers of at least 1, got {draft_length=}, {tree=}")
    known = target_config.vocab_size
    if draft and draft.draft_vocabulary is not None:
        known = len(draft.draft_vocabulary)
    if shape.max_children > known:
        raise ValueError(
            f"a node cannot have {shape.max_children} different children: "
            f"there are {known} tokens to draft"
        )
    _check_size(shape.size, shape.depth, context_size)
    if shape.max_slots > LARGEST_TREE:
        raise ValueError(f"a tree that grows to {shape.max_slots} nodes is over {LARGEST_TREE}")
    return shape


def _check_size(size, depth, context_size):
    limits = (context_size, "the target's context of"), (LARGEST_TREE, "a draft may have,")
    for largest, what in limits:
        if max(size, depth) > largest:
            raise ValueError(f"a tree of {size} nodes, {depth} deep, is more than {what} {largest}")


def choose_exits(config, method, exits=None, thresholds=None):
    """The exits and thresholds of a method with a draft; ValueError where they do not fit it."""
    depth = config.num_hidden_layers
    chosen = tuple(exits) if exits is not None else config.exit_layers or (depth,)
    if method in ("sd", "mcsd") and exits is None:
        chosen = chosen[-1:]
    if method in ("sd", "mcsd") and len(chosen) != 1:
        raise ValueError(
            f"method {method!r} drafts from one exit, got {list(chosen)}; 's2d' takes several"
        )
    increasing = list(chosen) == sorted(set(chosen))
    if not chosen or not increasing or chosen[0] < 0 or chosen[-1] > depth:
        layers = f"lie within the draft's {depth} layers" if depth else "without a draft be 0 alone"
        raise ValueError(f"exits must increase and {layers}, got {list(chosen)}")
    if thresholds is None:
        known = {0: TABLE_THRESHOLD} | dict(zip(config.exit_layers, config.thresholds))
        thresholds = [known.get(exit_layer, 0.5) for exit_layer in chosen[:-1]] + [0.0]
    if len(thresholds) != len(chosen):
        raise ValueError(
            f"{len(chosen)} exits {list(chosen)} need as many thresholds, got {len(thresholds)}"
        )
    if not all(0.0 <= threshold <= 1.0 for threshold in thresholds):
        raise ValueError(f"thresholds are probabilities within 0..1, got {list(thresholds)}")
    return chosen, tuple(thresholds)


def drafting_exits(draft, method, exits=None, thresholds=None):
    """The exits that ``start`` would use."""
    if method == "ar":
        return ()
    return choose_exits(draft.config if draft else WITHOUT_LAYERS, method, exits, thresholds)[0]


def choose_stop(config, exits, method, stop):
    """The confidence, or the decision model, that ends drafting early."""
    if callable(stop) and exits[0] == 0:
        raise ValueError("a decision model judges layers; it does not go with exit 0")
    if stop is None and exits == (0,):
        return TABLE_STOP
    if stop is None and method not in TREE_METHODS:
        return config.draft_stop
    return stop or 0.0


ALL_DRAFTS = ("draft", "exits", "init", "stop")
CHAINS = (*ALL_DRAFTS, "draft_length")
TREES = (*ALL_DRAFTS, "tree", "tree_top_k", "tree_depth", "tree_size", "with_replacement")
TAKEN = {  # method -> the options of drafting that it takes
    "ar": (),
    "sd": CHAINS,
    "mcsd": TREES,
    "s2d": (*CHAINS, "thresholds"),
    "s2d-tree": (*TREES, "thresholds"),
}
DRAFTING = tuple(dict.fromkeys(name for taken in TAKEN.values() for name in taken))


def refuse_unused(method, given):
    """ValueError where ``given``, names in DRAFTING, has an option that ``method`` does not take."""
    for name in given:
        if name not in TAKEN[method]:
            others = " or ".join(other for other in TAKEN if name in TAKEN[other])
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"--method {method} does not use {option}; leave it out, or use {others}"
            )
