"""``generate``: options become a plan, a plan becomes a drafter, and the loop runs.

Every option has its default here and is checked here, most of them by the configs of target and
draft alone. A method is a choice of objects: ``ar`` drafts nothing; ``sd`` drafts a chain from one
exit and ``s2d`` from sorted exits; ``mcsd`` and ``s2d-tree`` draft the same as trees.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from .decode import Stats, Step, checked, checked_list, clock, decode
from .draft import NoDraft, SortedDraft
from .exits import DraftConfig, TableExit, draft_head, sorted_exits
from .model import Llama, LlamaConfig
from .ngram import NGrams
from .proposal import LeastProbable, worth_a_row
from .sampling import Sampler, Sampling
from .tree import Dynamic, KConfig

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
CHAINS, TREES, SORTED = ("sd", "s2d"), ("mcsd", "s2d-tree"), ("s2d", "s2d-tree")
TAKEN_BY = dict.fromkeys(("exits", "stop", "init", "datastore"), METHODS[1:])  # by option: methods
TAKEN_BY |= {"thresholds": SORTED, "draft_length": CHAINS, "tree": TREES, "replacement": TREES}
FLAGS = ("init", "replacement")  # whose default is no None
K_CONFIG = (4, 2, 2, 1)
LARGEST_TREE = 2048  # nodes drafted for one pass: masks take this number squared
SMALLEST_TEMPERATURE = 1e-6  # logits divided by less might not be finite; 0 is greedy
UNSURE = 0.5  # the threshold of an exit that has none of its own
TABLE_THRESHOLD = 0.9  # of exit 0, in front of layers that know more than it does
TABLE_DRAWN = (2, 1)  # tree of exit 0 alone above T = 0: drawn tokens are accepted more often
PAYING = 1.35  # times a pass over one row: a pass that checks TABLE_DRAWN may take so long
LEAST = 0.03  # path of exit 0 that is still followed; what of it is sent is decided by costs
# What stands in a draft's config, for exit 0 alone.
TABLE_ALONE = SimpleNamespace(num_hidden_layers=0, exit_layers=(0,), thresholds=(0.0,))
TABLE_ALONE.draft_length, TABLE_ALONE.draft_tree = 4, (6, 7, 7)


@dataclass(frozen=True)
class Options:
    """What may be said about a generation; None stands for a default that depends on the models.

    ``exits`` and ``thresholds`` (one for each exit, within 0..1; the last exit always drafts)
    default to the draft's config; "sd" and "mcsd" use the last exit only. Exit 0 drafts what
    followed the last tokens before, in the text and in a ``datastore`` (extras/datastore.py);
    without a draft it is the only one.

    "sd" and "s2d" draft chains of ``draft_length`` tokens, "mcsd" and "s2d-tree" draft ``tree``:
    the numbers of children, level by level, such as (4, 2, 2, 1), or a ``Dynamic``. Defaults come
    from the draft's config (for exit 0 alone: TABLE_ALONE, above T = 0 TABLE_DRAWN if that pays),
    for "mcsd" it is K_CONFIG. Above T = 0 the children of a node are sampled, with or without
    ``replacement``; those of a Dynamic are always the likeliest. ``stop`` ends drafting early: a
    number, where a path is less probable than that (of a chain, the product of its confidences), or
    a decision model (extras/decision.py). By default chains have the draft's, its trees none, and
    exit 0 alone LEAST; of its tree as many nodes are sent then as give the most tokens a second by
    what passes cost here (extras/products.py).

    ``init`` "target" takes the first level of each tree from the target's last distribution
    (extras/roots.py). With several roots that is not lossless.
    """

    method: str = "s2d"
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    exits: tuple[int, ...] | None = None
    thresholds: tuple[float, ...] | None = None
    draft_length: int | None = None
    tree: tuple[int, ...] | Dynamic | None = None
    init: str = "draft"
    stop: Any = None
    replacement: bool = False
    datastore: Any = None

    def __post_init__(self):
        """Refuse with ValueError what is wrong whatever the models are, and what is not used."""
        known = self.method in METHODS
        refuse(not known, f"unknown method {self.method!r}; expected {' '.join(METHODS)}")
        refuse(self.init not in ("draft", "target"), f"init is 'draft' or 'target': {self.init!r}")
        for name, methods in TAKEN_BY.items():
            value = getattr(self, name)
            given = value not in (False, "draft") if name in FLAGS else value is not None
            others = f"leave it out, or use {' or '.join(methods)}"
            unused = given and self.method not in methods
            refuse(unused, f"method {self.method} does not use {name}; {others}")
        checked(self.max_new_tokens, "max_new_tokens", int, 1)
        least = 0 if self.temperature == 0 else SMALLEST_TEMPERATURE
        checked(self.temperature, "temperature, if not 0", float, least, 1e38)
        checked(self.top_p, "top_p", float, 1e-40, 1)
        checked(self.top_k, "top_k", int, 0)
        checked(self.seed, "seed", int, 0)

    def plan(self, target: LlamaConfig, draft: DraftConfig | None = None) -> "Plan":
        """What is to be done for a target and a draft with these configs; ValueError if it can't.

        ``draft`` is None for exit 0 alone.
        """
        if self.method == "ar":
            return Plan(self, (), (), KConfig(()), 0.0)
        if draft:
            ours, theirs = draft.vocab_size, target.vocab_size
            wrong = f"the draft has {ours} tokens, the target {theirs}: not the same"
            refuse(ours != theirs, wrong)
            draft = draft if isinstance(draft, DraftConfig) else DraftConfig(**vars(draft))
        draft = draft or TABLE_ALONE
        exits = self.chosen_exits(draft)
        wrong = f"a datastore is for exit 0, not for {list(exits)}"
        refuse(self.datastore and 0 not in exits, wrong)
        thresholds = self.chosen_thresholds(exits, draft)
        shape = self.chosen_shape(draft if exits[-1] > 0 else TABLE_ALONE)
        refuse_shape(shape, exits, target)
        sampled = self.method in TREES and shape.fixed
        wrong = "replacement is for siblings of a tree of fixed shape"
        refuse(self.replacement and not sampled, wrong)
        return Plan(self, exits, thresholds, shape, self.chosen_stop(exits, draft))

    def alone(self) -> "Options":
        """The same answer by the target alone."""
        kept = "max_new_tokens temperature top_p top_k seed".split()
        return Options("ar", **{name: getattr(self, name) for name in kept})

    def chosen_exits(self, draft):
        depth, single = draft.num_hidden_layers, self.method not in SORTED
        exits = self.exits
        if exits is None:
            exits = (draft.exit_layers or (depth,))[-1 if single else 0 :]
        exits = tuple(checked_list(exits, f"exits of {depth} draft layers", int, 0, depth))
        one = f"method {self.method!r} drafts from one exit, got {list(exits)}; 's2d' takes several"
        refuse(single and len(exits) != 1, one)
        refuse(list(exits) != sorted(set(exits)), f"exits must increase, got {list(exits)}")
        return exits

    def chosen_thresholds(self, exits, draft):
        """Those of the draft's config hold for its own exits together, in front of the last one.

        A 0 there says that no deeper exit is ever asked; whoever names other exits wants them.
        """
        if self.thresholds is None:
            own = dict(zip(draft.exit_layers, draft.thresholds))
            if tuple(each for each in exits if each > 0) != draft.exit_layers:
                own = {layer: threshold for layer, threshold in own.items() if threshold > 0}
            own[0] = TABLE_THRESHOLD
            return (*(own.get(layer, UNSURE) for layer in exits[:-1]), 0.0)
        thresholds = tuple(checked_list(self.thresholds, "thresholds", float, 0, 1))
        many = f"{exits=} need as many thresholds, got {thresholds}"
        refuse(len(thresholds) != len(exits), many)
        return thresholds

    def chosen_shape(self, draft):
        if self.method in CHAINS:
            length = draft.draft_length if self.draft_length is None else self.draft_length
            return KConfig((1,) * checked(length, "draft_length", int, 1, LARGEST_TREE))
        tree = self.tree
        if tree is None and self.method == "mcsd":
            tree = K_CONFIG
        elif tree is None:
            drawn = draft is TABLE_ALONE and self.temperature > 0
            tree = TABLE_DRAWN if drawn else Dynamic(*draft.draft_tree)
        grows = isinstance(tree, Dynamic)
        counts = checked_list(tree.counts if grows else tree, "tree", int, 1, LARGEST_TREE)
        return Dynamic(*counts) if grows else KConfig(tuple(counts))

    def chosen_stop(self, exits, draft):
        judges = hasattr(self.stop, "threshold")  # a decision model
        refuse(judges and exits[0] == 0, "a decision model judges layers; exit 0 has none")
        if judges:
            return self.stop
        if self.stop is not None:
            return checked(self.stop, "stop", float, 0, 1)
        if exits == (0,):
            return LEAST
        return draft.draft_stop if self.method in CHAINS else 0.0


def refuse(wrong, message):
    """Raise ValueError with ``message`` where something is ``wrong``."""
    if wrong:
        raise ValueError(message)


def refuse_shape(shape, exits, target):
    """ValueError for a tree that is too large, for this program or for the target's context."""
    most, longest = shape.max_children, target.max_position_embeddings
    wrong = f"a node cannot have {most} different children: there are {target.vocab_size} tokens"
    refuse(most > target.vocab_size, wrong)
    size, depth = shape.size, shape.depth
    long = f"a tree of {size} nodes, {depth} deep, is more than the target's context of {longest}"
    refuse(max(size, depth) > longest, long)
    # Not all is sent of a growing tree, and a table is asked about what is sent alone.
    drafted = max(size, shape.max_slots if exits[-1] > 0 else 0)
    refuse(drafted > LARGEST_TREE, f"a tree that drafts {drafted} nodes is over {LARGEST_TREE}")


@dataclass(frozen=True)
class Plan:
    """Options resolved: what is printed, shown and run.

    ``stop`` is a probability or a decision model. ``costs``: seconds of a pass of the target over
    1, 2, ... rows, where they decide what is sent.
    """

    options: Options
    exits: tuple[int, ...]
    thresholds: tuple[float, ...]
    shape: KConfig | Dynamic
    stop: Any
    costs: tuple[float, ...] | None = None

    @property
    def by_costs(self):
        """Whether nothing was said of how much to draft: then what passes cost here says it."""
        options = self.options
        return self.exits == (0,) and options.stop is None and options.init == "draft"

    def with_costs(self, costs):
        """This plan, by the target's ``costs`` (see ``row_costs`` in extras/products.py)."""
        shape = self.shape
        dear = costs[KConfig(TABLE_DRAWN).size] >= PAYING * costs[0]
        if self.options.tree is None and shape == KConfig(TABLE_DRAWN) and dear:
            shape = Dynamic(*TABLE_ALONE.draft_tree)
        costs = tuple(costs[: shape.size + 1])
        stop = max(self.stop, worth_a_row(costs))
        return replace(self, shape=shape, stop=stop, costs=costs)

    def in_force(self):
        """{option: its value}, as ``--json`` and the trace's page show it; a shape as numbers."""
        shown = vars(self.options) | {"exits": self.exits, "thresholds": self.thresholds}
        shown["stop"] = None if hasattr(self.stop, "threshold") else self.stop
        if self.options.method in TREES:
            shown["tree"] = vars(self.shape)
        elif self.options.method in CHAINS:
            shown["draft_length"] = self.shape.depth
        return shown


class Generation:
    """An answer in the making: iterating over it decodes, a Step at a time.

    ``plan`` is what is done; ``tokens`` are the new ones so far, with EOS last if it was produced;
    ``stats`` is a Stats of the steps so far; ``exact`` tells whether the method is lossless.
    """

    def __init__(self, steps: Iterator[Step], plan: Plan, exact: bool, eos_token_ids, ends):
        self.steps, self.plan, self.exact = steps, plan, exact
        self.eos_token_ids, self.ends = eos_token_ids, ends  # {number of tokens: why no more}
        self.tokens: list[int] = []
        self.stats = Stats()

    def __iter__(self) -> Iterator[Step]:
        for step in self.steps:
            self.stats.add(step)
            self.tokens += step.tokens
            yield step

    def finish(self) -> "Generation":
        """Decode to the end."""
        for _ in self:
            pass
        return self

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

    ``options``: see Options. Ends at EOS, after ``max_new_tokens`` or where the target's context is
    full. Raises ValueError for anything that cannot be run.
    """
    return start(target, tokens, draft, method, **options).finish()


def start(target: Llama, tokens, draft=None, method="s2d", **options) -> Generation:
    """As ``generate``, but it has not begun. ``tokens``: a list or 1-D tensor of ids."""
    config, options = target.config, Options(method, **options)
    plan = options.plan(config, draft and draft.config)
    tokens = checked_list(tokens, "the prompt's ids", int, 0, config.vocab_size - 1)
    n, size, longest = len(tokens), config.max_position_embeddings, int(options.max_new_tokens)
    refuse(n >= size, f"the prompt has {n} tokens; the target's context of {size} is full")
    if plan.exits:
        from .extras.products import lay_out, row_costs

        for model in (target, draft) if plan.exits[-1] > 0 else (target,):
            lay_out(model)
        if plan.by_costs and (costs := row_costs(target)):
            plan = plan.with_costs(costs)
    began, limit = clock(target.device), min(n + longest, size)
    drafter = make_drafter(plan, target, draft, limit)
    steps = decode(target, tokens, drafter, sampling_of(options, target.device), limit)
    ends = {size - n: "context", longest: "length"}  # "length" where both are true
    generation = Generation(steps, plan, drafter.exact, config.eos_token_ids, ends)
    generation.stats.seconds = clock(target.device) - began  # of the caches; each step adds
    return generation


def sampling_of(options, device):
    """How tokens are drawn."""
    sampler = Sampler(int(options.seed), device)
    how = float(options.temperature), float(options.top_p), options.replacement
    return Sampling(*how, sampler, int(options.top_k))


def make_drafter(plan, target, draft, limit):
    """The drafter of a plan, for contexts of at most ``limit`` tokens."""
    if plan.exits:
        table = make_table(plan, target) if plan.exits[0] == 0 else None
        if plan.exits[-1] > 0 and (head := draft_head(draft)):
            most, known = plan.shape.max_children, len(head.tokens)
            few = f"a node cannot have {most} different children: there are {known} tokens"
            refuse(most > known, few)
        capacity = limit + max(plan.shape.size, plan.shape.max_slots)
        exits = sorted_exits(plan.exits, plan.thresholds, draft, table, capacity)
        model = draft if plan.exits[-1] > 0 else target
        how = plan.shape, make_rule(plan.stop), capacity, model.device, model.dtype, plan.costs
        drafter = SortedDraft(exits, *how)
    else:
        drafter = NoDraft(target.device)
    if plan.options.init == "target":
        from .extras.roots import TargetRoots

        drafter = TargetRoots(drafter)
    if target.mesh is not None:
        from .extras.parallel import FirstDecides

        drafter = FirstDecides(drafter, target.device)
    return drafter


def make_table(plan, target):
    """Exit 0 for ``target``; ValueError where the datastore has tokens it does not know."""
    datastore, size = plan.options.datastore, target.config.vocab_size
    largest = datastore.largest if datastore else 0
    refuse(largest >= size, f"the datastore has token {largest}, the target has {size}")
    return TableExit(NGrams(datastore), plan.thresholds[0], size, target.device, target.dtype)


def make_rule(stop):
    """The stopping rule of a plan: by a probability, or by a decision model."""
    if not hasattr(stop, "threshold"):
        return LeastProbable(stop)
    from .extras.decision import PathStop

    return PathStop(stop)
