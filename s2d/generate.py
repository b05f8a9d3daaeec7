"""``generate``: names and numbers become a drafter, and the loop runs.

Every option is checked here and gets its default here, many of them from the draft's config. A
method is a choice of objects: ``ar`` drafts nothing; ``sd`` drafts a chain from one exit and
``s2d`` from sorted exits; ``mcsd`` and ``s2d-tree`` draft the same as trees.
"""

from collections.abc import Iterator
from types import SimpleNamespace

from .decode import Stats, Step, clock, decode
from .draft import NoDraft, SortedDraft, Table
from .model import Llama
from .ngram import NGrams
from .sampling import Sampler, Sampling
from .tree import Dynamic, KConfig

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
TREE_METHODS = ("mcsd", "s2d-tree")
K_CONFIG = (4, 2, 2, 1)
LARGEST_TREE = 2048  # nodes drafted for one pass: masks take this number squared
SMALLEST_TEMPERATURE = 1e-6  # logits divided by less might not be finite; 0 is greedy
TABLE_THRESHOLD = 0.9  # of exit 0, in front of layers that know more than it does
TABLE_DRAWN = (2, 1)  # tree of exit 0 alone above T = 0: drawn tokens are accepted more often
# What stands in a draft's config, for exit 0 alone.
TABLE_ALONE = SimpleNamespace(num_hidden_layers=0, exit_layers=(0,), thresholds=(0.0,))
TABLE_ALONE.draft_length, TABLE_ALONE.draft_tree = 4, (6, 7, 7)
FREE_ROW, STATIC_ROW, DEAR_ROW = 0.05, 0.2, 0.3  # least path: half precision; compiled; float32


class Generation:
    """An answer in the making: iterating over it decodes, a Step at a time.

    ``tokens`` are the new ones so far, with EOS last if it was produced; ``stats`` is a Stats of
    the steps so far; ``exact`` tells whether the method is lossless.
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
    datastore=None,
) -> Generation:
    """A Generation that continues ``tokens``, a list of ids, and has not begun.

    ``exits`` and ``thresholds`` (one for each exit, within 0..1; the last exit always drafts)
    default to the draft's config; "sd" and "mcsd" use the last exit only. Exit 0 drafts what
    followed the last tokens before, in the text and in a ``datastore`` (extras/datastore.py);
    without a draft it is the only one.

    "sd" and "s2d" draft chains of ``draft_length`` tokens, "mcsd" and "s2d-tree" draft ``tree``:
    the numbers of children, level by level, such as (4, 2, 2, 1), or a ``Dynamic``. Defaults come
    from the draft's config (for exit 0 alone: TABLE_ALONE, and TABLE_DRAWN above T = 0), for "mcsd"
    it is K_CONFIG. Above T = 0 the children of a node are sampled, with or without ``replacement``;
    those of a Dynamic are always the likeliest. ``stop`` ends drafting early: a number, where
    a path is less probable than that (of a chain, the product of its confidences: draft.py), or a
    decision model (extras/decision.py). By default chains have the draft's, its trees none, and
    exit 0 alone FREE_ROW, STATIC_ROW or DEAR_ROW.

    ``init`` "target" takes the first level of each tree from the target's last distribution
    (extras/roots.py). With several roots that is not lossless.

    Ends at EOS, after ``max_new_tokens`` or where the target's context is full. Raises ValueError
    for anything that cannot be run.
    """
    began, config = clock(target.device), target.config
    check(config, tokens, max_new_tokens, temperature, top_p, seed)
    check_method(config, draft, method, init)
    limit = min(len(tokens) + max_new_tokens, config.max_position_embeddings)
    if method == "ar":
        drafting = exits, thresholds, draft_length, tree, stop, datastore
        refuse(any(option is not None for option in drafting), "method 'ar' drafts nothing")
        drafter = NoDraft(target.device)
    else:
        exits, thresholds, stop = choose_exits(target, draft, method, exits, thresholds, stop)
        refuse(datastore and 0 not in exits, f"a datastore is for exit 0, not for {list(exits)}")
        layers = draft if exits[-1] > 0 else None
        shape = choose_shape(config, layers, method, temperature, draft_length, tree)
        table = make_table(target, datastore) if exits[0] == 0 else None
        least, policy = stop, None
        if callable(stop):
            from .extras.decision import PathStop

            least, policy = 0.0, PathStop(stop)
        drafter = SortedDraft(layers, exits, thresholds, shape, limit, least, policy, table)
        if init == "target":
            from .extras.roots import TargetRoots

            drafter = TargetRoots(drafter)
    if target.mesh is not None:
        from .extras.parallel import FirstDecides

        drafter = FirstDecides(drafter, target.device)
    sampling = Sampling(temperature, top_p, replacement, Sampler(seed, target.device))
    generation = Generation(decode(target, tokens, drafter, sampling, limit), drafter.exact)
    generation.stats.seconds = clock(target.device) - began  # of the caches; each step adds
    return generation


def make_table(target, datastore):
    """Exit 0 for ``target``; ValueError where the ``datastore`` has tokens it does not know."""
    size, known = target.config.vocab_size, datastore.largest if datastore else 0
    refuse(known >= size, f"the datastore has token {known}, the target has {size}")
    return Table(NGrams(datastore), size, target.device, target.dtype)


def refuse(wrong, message):
    """Raise ValueError with ``message`` where something is ``wrong``."""
    if wrong:
        raise ValueError(message)


def check(config, tokens, max_new_tokens, temperature, top_p, seed):
    """Raise ValueError where a target with this ``config`` cannot continue ``tokens`` so."""
    T, size, vocab_size = len(tokens), config.max_position_embeddings, config.vocab_size
    inside = 0 <= min(tokens, default=0) <= max(tokens, default=0) < vocab_size
    warm = temperature == 0.0 or SMALLEST_TEMPERATURE <= temperature < float("inf")
    refuse(not tokens, "the prompt is empty; give at least one token")
    refuse(not inside, f"the prompt has ids outside the target's vocabulary of {vocab_size}")
    refuse(T >= size, f"the prompt has {T} tokens; the target's context of {size} is full")
    refuse(max_new_tokens < 1, f"lengths must be at least 1, got {max_new_tokens=}")
    refuse(not warm, f"temperature must be 0 or at least {SMALLEST_TEMPERATURE}, got {temperature}")
    refuse(not 0.0 < top_p <= 1.0, f"top_p must be above 0 and at most 1, got {top_p}")
    refuse(not 0 <= seed < 2**63, f"seed must be a whole number from 0 to 2^63 - 1, got {seed}")


def check_method(config, draft, method, init):
    """Raise ValueError where ``method`` cannot draft with ``draft`` for a target's ``config``."""
    known = ", ".join(METHODS)
    refuse(method not in METHODS, f"unknown method {method!r}; expected one of {known}")
    refuse(init not in ("draft", "target"), f"init is 'draft' or 'target', got {init!r}")
    if method != "ar" and draft is not None:
        ours, theirs = draft.config.vocab_size, config.vocab_size
        sizes = f"the draft has {ours} tokens, the target {theirs}"
        refuse(ours != theirs, f"draft and target must share one vocabulary: {sizes}")


def choose_exits(target, draft, method, exits=None, thresholds=None, stop=None):
    """The exits of a method, their thresholds, and what ends drafting early (see ``start``)."""
    if method == "ar":
        return (), (), None
    config, single = draft.config if draft else TABLE_ALONE, method in ("sd", "mcsd")
    depth = config.num_hidden_layers
    if exits is None:
        exits = (config.exit_layers or (depth,))[-1 if single else 0 :]
    exits = tuple(exits)
    rising = exits and list(exits) == sorted(set(exits)) and 0 <= exits[0] <= exits[-1] <= depth
    within = f"lie within the draft's {depth} layers" if depth else "without a draft be 0 alone"
    many = f"method {method!r} drafts from one exit, got {list(exits)}; 's2d' takes several"
    refuse(single and len(exits) != 1, many)
    refuse(not rising, f"exits must increase and {within}, got {list(exits)}")
    if thresholds is None:
        known = {0: TABLE_THRESHOLD} | dict(zip(config.exit_layers, config.thresholds))
        thresholds = [known.get(exit_layer, 0.5) for exit_layer in exits[:-1]] + [0.0]
    one_each = f"{len(exits)} exits {list(exits)} need as many thresholds, got {len(thresholds)}"
    refuse(len(thresholds) != len(exits), one_each)
    probable = all(0.0 <= threshold <= 1.0 for threshold in thresholds)
    refuse(not probable, f"thresholds are probabilities within 0..1, got {list(thresholds)}")
    if stop is None and exits == (0,):
        row = DEAR_ROW if target.dtype.itemsize > 2 else STATIC_ROW if target.compiled else FREE_ROW
        stop = FREE_ROW if target.device.type == "cuda" else row
    elif stop is None:
        stop = 0.0 if method in TREE_METHODS else config.draft_stop
    refuse(callable(stop) and exits[0] == 0, "a decision model judges layers; exit 0 has none")
    refuse(not callable(stop) and not 0 <= stop <= 1, f"stop is a probability 0..1, got {stop}")
    return exits, tuple(thresholds), stop


def choose_shape(target_config, draft, method, temperature, draft_length=None, tree=None):
    """The shape of tree a method drafts; ValueError where it fits neither method nor models."""
    config = draft.config if draft else TABLE_ALONE
    if method in TREE_METHODS:
        wrong = f"method {method!r} drafts a tree; give its shape, not a draft length"
        refuse(draft_length is not None, wrong)
        if tree is None:
            growing = Dynamic(*config.draft_tree) if draft or not temperature else TABLE_DRAWN
            tree = K_CONFIG if method == "mcsd" else growing
        shape = tree if isinstance(tree, Dynamic) else KConfig(tuple(tree))
    else:
        names = " or ".join(map(repr, TREE_METHODS))
        refuse(tree is not None, f"method {method!r} drafts no tree; use {names} for one")
        length = config.draft_length if draft_length is None else draft_length
        refuse(length > LARGEST_TREE, f"a chain of {length} tokens is over {LARGEST_TREE}")
        shape = KConfig((1,) * length)
    limited = draft and draft.draft_vocabulary is not None
    known = len(draft.draft_vocabulary) if limited else target_config.vocab_size
    least, most = min(shape.numbers, default=0), shape.max_children
    size, depth, longest = shape.size, shape.depth, target_config.max_position_embeddings
    drafted = max(size, shape.max_slots if draft else 0)  # not all is sent of a growing tree
    refuse(least < 1, f"a draft needs whole numbers of at least 1, got {draft_length=}, {tree=}")
    differ = f"a node cannot have {most} different children: there are {known} tokens to draft"
    refuse(most > known, differ)
    long = f"a tree of {size} nodes, {depth} deep, is more than the target's context of {longest}"
    refuse(max(size, depth) > longest, long)
    refuse(drafted > LARGEST_TREE, f"a tree that drafts {drafted} nodes is over {LARGEST_TREE}")
    return shape
