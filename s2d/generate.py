"""``generate``: names and numbers become a drafter, and the loop runs.

Every option is checked here and gets its default here, many of them from the draft's config. A
method is a choice of objects: ``ar`` drafts nothing; ``sd`` drafts a chain from one exit and
``s2d`` from sorted exits; ``mcsd`` and ``s2d-tree`` draft the same as trees.
"""

from collections.abc import Iterator
from types import SimpleNamespace

from .decode import Stats, Step, clock, decode, number, numbers
from .draft import NoDraft, SortedDraft, Table
from .model import Llama
from .ngram import NGrams
from .proposal import worth_a_row
from .sampling import Sampler, Sampling
from .tree import Dynamic, KConfig

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
TREE_METHODS = ("mcsd", "s2d-tree")
K_CONFIG = (4, 2, 2, 1)
LARGEST_TREE = 2048  # nodes drafted for one pass: masks take this number squared
SMALLEST_TEMPERATURE = 1e-6  # logits divided by less might not be finite; 0 is greedy
TABLE_THRESHOLD = 0.9  # of exit 0, in front of layers that know more than it does
TABLE_DRAWN = (2, 1)  # tree of exit 0 alone above T = 0: drawn tokens are accepted more often
PAYING = 1.35  # times a pass over one row: a pass that checks TABLE_DRAWN may take so long
# What stands in a draft's config, for exit 0 alone.
TABLE_ALONE = SimpleNamespace(num_hidden_layers=0, exit_layers=(0,), thresholds=(0.0,))
TABLE_ALONE.draft_length, TABLE_ALONE.draft_tree = 4, (6, 7, 7)
LEAST = 0.03  # path of exit 0 that is still followed; what of it is sent is decided by costs


class Generation:
    """An answer in the making: iterating over it decodes, a Step at a time.

    ``tokens`` are the new ones so far, with EOS last if it was produced; ``stats`` is a Stats of
    the steps so far; ``exact`` tells whether the method is lossless. ``costs``: seconds of a pass
    over 1, 2, ... rows, where they decide what is sent.
    """

    def __init__(self, steps: Iterator[Step], exact: bool, eos_token_ids, ends, costs=None):
        self.steps, self.exact, self.costs = steps, exact, costs
        self.eos_token_ids, self.ends = eos_token_ids, ends  # {number of tokens: why no more}
        self.tokens: list[int] = []
        self.stats = Stats()

    def __iter__(self) -> Iterator[Step]:
        for step in self.steps:
            self.stats.add(step)
            self.tokens += step.tokens
            yield step

    @property
    def ended(self) -> str:
        """Why: "eos", "length" (``max_new_tokens``) or a full "context"; "" where it has not."""
        eos = self.tokens and self.tokens[-1] in self.eos_token_ids
        return "eos" if eos else self.ends.get(len(self.tokens), "")

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
    top_k: int = 0,
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
    """A Generation that continues ``tokens``, a list or 1-D tensor of ids, and has not begun.

    ``exits`` and ``thresholds`` (one for each exit, within 0..1; the last exit always drafts)
    default to the draft's config; "sd" and "mcsd" use the last exit only. Exit 0 drafts what
    followed the last tokens before, in the text and in a ``datastore`` (extras/datastore.py);
    without a draft it is the only one.

    "sd" and "s2d" draft chains of ``draft_length`` tokens, "mcsd" and "s2d-tree" draft ``tree``:
    the numbers of children, level by level, such as (4, 2, 2, 1), or a ``Dynamic``. Defaults come
    from the draft's config (for exit 0 alone: TABLE_ALONE, above T = 0 TABLE_DRAWN if that pays),
    for "mcsd" it is K_CONFIG. Above T = 0 the children of a node are sampled, with or without
    ``replacement``; those of a Dynamic are always the likeliest. ``stop`` ends drafting early: a
    number, where a path is less probable than that (of a chain, the product of its confidences:
    draft.py), or a decision model (extras/decision.py). By default chains have the draft's, its
    trees none, and exit 0 alone LEAST; of its tree as many nodes are sent then as give the most
    tokens a second by what passes cost here (extras/products.py).

    ``init`` "target" takes the first level of each tree from the target's last distribution
    (extras/roots.py). With several roots that is not lossless.

    Ends at EOS, after ``max_new_tokens`` or where the target's context is full. Raises ValueError
    for anything that cannot be run.
    """
    config, costs = target.config, None
    tokens = numbers(tokens, "the prompt's ids", int, 0, config.vocab_size - 1)
    longest = number(max_new_tokens, "max_new_tokens", int, 1)
    n, size = len(tokens), config.max_position_embeddings
    refuse(n >= size, f"the prompt has {n} tokens; the target's context of {size} is full")
    sampling = make_sampling(target.device, temperature, top_p, top_k, seed, replacement)
    check_method(config, draft, method, init)
    limit = min(n + longest, size)
    if method != "ar":
        from .extras.products import lay_out, row_costs

        by_costs = stop is None and init == "draft"
        exits, thresholds, stop = choose_exits(target, draft, method, exits, thresholds, stop)
        for model in (target, draft) if exits[-1] > 0 and draft else (target,):
            lay_out(model)
        costs = row_costs(target) if exits == (0,) and by_costs else None
    began = clock(target.device)
    if method == "ar":
        drafting = exits, thresholds, draft_length, tree, stop, datastore, replacement or None
        refuse(any(option is not None for option in drafting), "method 'ar' drafts nothing")
        drafter = NoDraft(target.device)
    else:
        refuse(datastore and 0 not in exits, f"a datastore is for exit 0, not for {list(exits)}")
        layers = draft if exits[-1] > 0 else None
        shape = choose_shape(config, layers, method, temperature, draft_length, tree, costs)
        drawn = method in TREE_METHODS and shape.fixed
        refuse(replacement and not drawn, "replacement is for siblings of a tree of fixed shape")
        table = make_table(target, datastore) if exits[0] == 0 else None
        least, policy = stop, None
        if callable(stop):
            from .extras.decision import PathStop

            least, policy = 0.0, PathStop(stop)
        if costs:
            costs = costs[: shape.size + 1]
            least = max(least, worth_a_row(costs))
        drafter = SortedDraft(layers, exits, thresholds, shape, limit, least, policy, table, costs)
        if init == "target":
            from .extras.roots import TargetRoots

            drafter = TargetRoots(drafter)
    if target.mesh is not None:
        from .extras.parallel import FirstDecides

        drafter = FirstDecides(drafter, target.device)
    steps = decode(target, tokens, drafter, sampling, limit)
    grown = None if drafter.shape.fixed else costs
    ends = {size - n: "context", longest: "length"}  # "length" where both are true
    generation = Generation(steps, drafter.exact, config.eos_token_ids, ends, grown)
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


def make_sampling(device, temperature, top_p, top_k, seed, replacement):
    """The Sampling of these numbers; ValueError where they are none."""
    least = 0 if temperature == 0 else SMALLEST_TEMPERATURE
    temperature = number(temperature, "temperature, if not 0", float, least, 1e38)
    top_p, top_k = number(top_p, "top_p", float, 1e-40, 1), number(top_k, "top_k", int, 0)
    sampler = Sampler(number(seed, "seed", int, 0), device)
    return Sampling(temperature, top_p, replacement, sampler, top_k)


def check_method(config, draft, method, init):
    """Raise ValueError where ``method`` cannot draft with ``draft`` for a target's ``config``."""
    refuse(method not in METHODS, f"unknown method {method!r}; expected {' '.join(METHODS)}")
    refuse(init not in ("draft", "target"), f"init is 'draft' or 'target', got {init!r}")
    if method != "ar" and draft is not None:
        ours, theirs = draft.config.vocab_size, config.vocab_size
        refuse(ours != theirs, f"the draft has {ours} tokens, the target {theirs}: not the same")


def choose_exits(target, draft, method, exits=None, thresholds=None, stop=None):
    """The exits of a method, their thresholds, and what ends drafting early (see ``start``)."""
    if method == "ar":
        return (), (), None
    config, single = draft.config if draft else TABLE_ALONE, method in ("sd", "mcsd")
    depth = config.num_hidden_layers
    if exits is None:
        exits = (config.exit_layers or (depth,))[-1 if single else 0 :]
    exits = tuple(numbers(exits, f"exits of {depth} draft layers", int, 0, depth))
    many = f"method {method!r} drafts from one exit, got {list(exits)}; 's2d' takes several"
    refuse(single and len(exits) != 1, many)
    refuse(list(exits) != sorted(set(exits)), f"exits must increase, got {list(exits)}")
    if thresholds is None:
        known = {0: TABLE_THRESHOLD} | dict(zip(config.exit_layers, config.thresholds))
        thresholds = [known.get(exit_layer, 0.5) for exit_layer in exits[:-1]] + [0.0]
    thresholds = tuple(numbers(thresholds, "thresholds", float, 0, 1))
    refuse(len(thresholds) != len(exits), f"{exits=} need as many thresholds, got {thresholds}")
    if stop is None and exits == (0,):
        stop = LEAST
    elif stop is None:
        stop = 0.0 if method in TREE_METHODS else config.draft_stop
    judges = callable(stop) and hasattr(stop, "threshold")  # a decision model
    refuse(judges and exits[0] == 0, "a decision model judges layers; exit 0 has none")
    return exits, thresholds, stop if judges else number(stop, "stop", float, 0, 1)


def choose_shape(
    target_config, draft, method, temperature, draft_length=None, tree=None, costs=None
):
    """The shape of tree a method drafts; ValueError where it fits neither method nor models."""
    config = draft.config if draft else TABLE_ALONE
    if method in TREE_METHODS:
        refuse(draft_length is not None, f"method {method!r} drafts a tree; give its shape")
        if tree is None:
            drawn = temperature > 0 and (costs is None or costs[4] < PAYING * costs[0])
            growing = Dynamic(*config.draft_tree) if draft or not drawn else TABLE_DRAWN
            tree = K_CONFIG if method == "mcsd" else growing
        grows = isinstance(tree, Dynamic)
        counts = numbers(tree.numbers if grows else tree, "tree", int, 1, LARGEST_TREE)
        shape = Dynamic(*counts) if grows else KConfig(tuple(counts))
    else:
        names = " or ".join(map(repr, TREE_METHODS))
        refuse(tree is not None, f"method {method!r} drafts no tree; use {names} for one")
        length = config.draft_length if draft_length is None else draft_length
        shape = KConfig((1,) * number(length, "draft_length", int, 1, LARGEST_TREE))
    limited = draft and draft.draft_vocabulary is not None
    known = len(draft.draft_vocabulary) if limited else target_config.vocab_size
    most = shape.max_children
    size, depth, longest = shape.size, shape.depth, target_config.max_position_embeddings
    drafted = max(size, shape.max_slots if draft else 0)  # not all is sent of a growing tree
    refuse(most > known, f"a node cannot have {most} different children: there are {known} tokens")
    long = f"a tree of {size} nodes, {depth} deep, is more than the target's context of {longest}"
    refuse(max(size, depth) > longest, long)
    refuse(drafted > LARGEST_TREE, f"a tree that drafts {drafted} nodes is over {LARGEST_TREE}")
    return shape
