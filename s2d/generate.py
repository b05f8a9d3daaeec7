"""``generate``: options become a plan, a plan becomes a drafter, and the loop runs.

A method is a choice of objects: ``ar`` drafts nothing; ``sd`` drafts a chain from one exit and
``s2d`` from sorted exits; ``mcsd`` and ``s2d-tree`` draft the same as trees.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from .decode import Scorer, Stats, Step, checked, checked_list, clock, new_loop, steps_of
from .draft import NoDraft, SortedDraft
from .exits import DraftConfig, TableExit, sorted_exits
from .model import Llama, LlamaConfig
from .proposal import LeastProbable
from .sampling import Sampler, Sampling
from .tree import Dynamic, KConfig

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
CHAINS, TREES, SORTED = ("sd", "s2d"), ("mcsd", "s2d-tree"), ("s2d", "s2d-tree")
USED_BY = {"draft_length": CHAINS, "tree": TREES, "replacement": TREES, "thresholds": SORTED}
USED_BY |= dict.fromkeys(("exits", "stop", "init", "datastore"), METHODS[1:])
K_CONFIG = (4, 2, 2, 1)
LARGEST_TREE = 2048  # nodes drafted for one pass: masks take this number squared
SMALLEST_TEMPERATURE = 1e-6  # logits divided by less might not be finite; 0 is greedy
UNSURE = 0.5  # the threshold of an exit that has none of its own: the published one
TABLE_THRESHOLD = 0.9  # of exit 0, in front of layers that know more than it does: measured
LEAST = 0.03  # path of exit 0 that is still followed; what of it is sent is decided by costs
# What stands in a draft's config, for exit 0 alone:
TABLE_ALONE = SimpleNamespace(num_hidden_layers=0, exit_layers=(0,), thresholds=(0.0,))
TABLE_ALONE.draft_length, TABLE_ALONE.draft_tree = 4, (6, 7, 7)


@dataclass(frozen=True)
class Options:
    """What may be said about a generation. None: a default by draft and method, see ``plan``.

    ValueError for what is wrong whatever the models are, and for what a method does not use.
    """

    method: str = "s2d"  # one of METHODS
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int = 0
    exits: tuple[int, ...] | None = None  # numbers of layers, 0 for the table; "sd", "mcsd": one
    thresholds: tuple[float, ...] | None = None  # of the exits; the last one always drafts
    draft_length: int | None = None  # of a chain
    tree: tuple[int, ...] | Dynamic | None = None  # children level by level, or it grows
    init: str = "draft"  # "target" gives a tree its roots: not lossless with several (roots.py)
    stop: Any = None  # a path's least probability, or a decision model (extras/decision.py)
    replacement: bool = False  # how the children of a node are drawn above T = 0
    coupled: bool = False  # above T = 0 the text depends on seed and target alone; see Plan
    datastore: Any = None  # what exit 0 knows besides the text (extras/datastore.py)

    def __post_init__(self):
        known = f"unknown method {self.method!r}; expected {' '.join(METHODS)}"
        refuse(self.method not in METHODS, known)
        refuse(self.init not in ("draft", "target"), f"init is 'draft' or 'target': {self.init!r}")
        for name, methods in USED_BY.items():
            value, default = getattr(self, name), getattr(Options, name)
            given = value is not None if default is None else value != default
            others = f"leave it out, or use {' or '.join(methods)}"
            unused = given and self.method not in methods
            refuse(unused, f"method {self.method} does not use {name}; {others}")
        both = "replacement is for tokens that are tested; with coupled none is"
        refuse(self.replacement and self.coupled, both)
        checked(self.max_new_tokens, "max_new_tokens", int, 1)
        least = 0 if self.temperature == 0 else SMALLEST_TEMPERATURE
        checked(self.temperature, "temperature, if not 0", float, least, 1e38)
        checked(self.top_p, "top_p", float, 1e-40, 1)
        checked(self.top_k, "top_k", int, 0)
        checked(self.seed, "seed", int, 0)

    def plan(self, target: LlamaConfig, draft: DraftConfig | None = None) -> "Plan":
        """What is to be done with models of these configs; ValueError where it cannot be.

        Without a ``draft`` there is exit 0 alone. Its own exits, thresholds, shapes and stop are
        the defaults; but "mcsd" has K_CONFIG, and trees of layers no stop.
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
        stored = self.datastore and 0 not in exits
        refuse(stored, f"a datastore is for exit 0, not for {list(exits)}")
        thresholds = self.chosen_thresholds(exits, draft)
        shape = self.chosen_shape(draft if exits[-1] > 0 else TABLE_ALONE)
        refuse_wide(shape, target.vocab_size)
        refuse_large(shape, exits, target.max_position_embeddings)
        grows = self.replacement and not shape.fixed
        refuse(grows, "replacement is for siblings of a tree of fixed shape")
        return Plan(self, exits, thresholds, shape, self.chosen_stop(exits, draft))

    def chosen_exits(self, draft):
        depth, single = draft.num_hidden_layers, self.method not in SORTED
        own = draft.exit_layers or (depth,)
        exits = own[-1:] if single else own
        if self.exits is not None:
            what = f"exits of {depth} draft layers"
            exits = tuple(checked_list(self.exits, what, int, 0, depth))
        one = f"method {self.method!r} drafts from one exit, got {list(exits)}; 's2d' takes several"
        refuse(single and len(exits) != 1, one)
        refuse(list(exits) != sorted(set(exits)), f"exits must increase, got {list(exits)}")
        return exits

    def chosen_thresholds(self, exits, draft):
        if self.thresholds is not None:
            given = tuple(checked_list(self.thresholds, "thresholds", float, 0, 1))
            many = f"{exits=} need as many thresholds, got {given}"
            refuse(len(given) != len(exits), many)
            return given
        own = dict(zip(draft.exit_layers, draft.thresholds))
        if tuple(layer for layer in exits if layer) != draft.exit_layers:
            # An exit with threshold 0 leaves none to those behind it, and these were asked for.
            own = {layer: threshold for layer, threshold in own.items() if threshold}
        own[0] = TABLE_THRESHOLD
        return (*(own.get(layer, UNSURE) for layer in exits[:-1]), 0.0)

    def chosen_shape(self, draft):
        if self.method in CHAINS:
            length = draft.draft_length if self.draft_length is None else self.draft_length
            return KConfig((1,) * checked(length, "draft_length", int, 1, LARGEST_TREE))
        tree, how = self.tree, ("tree", int, 1, LARGEST_TREE)
        if tree is None:
            tree = K_CONFIG if self.method == "mcsd" else Dynamic(*draft.draft_tree)
        if isinstance(tree, Dynamic):
            return Dynamic(*checked_list(astuple(tree), *how))
        return KConfig(tuple(checked_list(tree, *how)))

    def chosen_stop(self, exits, draft):
        if is_decision(self.stop):
            refuse(exits[0] == 0, "a decision model judges layers; exit 0 has none")
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


def refuse_large(shape, exits, longest):
    """ValueError for a tree that is too large, for this program or for the target's context."""
    size, depth = shape.size, shape.depth
    long = f"a tree of {size} nodes, {depth} deep, is more than the target's context of {longest}"
    refuse(max(size, depth) > longest, long)
    # Not all is sent of a growing tree; a table is asked only about what is.
    drafted = max(size, shape.max_slots) if exits[-1] else size
    refuse(drafted > LARGEST_TREE, f"a tree that drafts {drafted} nodes is over {LARGEST_TREE}")


def refuse_wide(shape, known):
    most = shape.max_children
    wide = f"a node cannot have {most} different children: there are {known} tokens"
    refuse(most > known, wide)


def is_decision(stop):
    return hasattr(stop, "threshold")


@dataclass(frozen=True)
class Plan:
    """Options resolved: what is printed, shown and run."""

    options: Options
    exits: tuple[int, ...]
    thresholds: tuple[float, ...]
    shape: KConfig | Dynamic
    stop: Any  # a probability or a decision model
    costs: tuple[float, ...] | None = None  # of passes: where they decide what is sent (costs.py)

    @property
    def coupled(self) -> bool:
        """Whether draft and target run the same race for every position (sampling.py).

        So it is wherever nothing was drawn from q: of growing trees, and of exit 0 alone.
        """
        undrawn = not self.shape.fixed or self.exits in ((), (0,))
        tested = self.options.init == "target" or self.options.replacement
        return self.options.coupled or undrawn and not tested

    def in_force(self):
        """{option: its value}, to be shown; of a shape its numbers, of a decision model None."""
        shown = {name: getattr(self, name) for name in ("exits", "thresholds", "coupled")}
        shown["stop"] = None if is_decision(self.stop) else self.stop
        if self.options.method in CHAINS:
            shown["draft_length"] = self.shape.depth
        elif self.options.method in TREES:
            shown["tree"] = vars(self.shape)
        return vars(self.options) | shown


class Generation:
    """An answer in the making: iterating over it decodes, a Step at a time.

    ``tokens`` are the new ones so far, with EOS last if it was produced; ``exact`` tells whether
    the method is lossless; ``ends`` is {number of tokens: why there are no more}.
    """

    def __init__(self, target: Llama, loop, plan: Plan, exact: bool, ends):
        self.target, self.loop, self.plan = target, loop, plan
        self.exact, self.ends = exact, ends
        self.tokens: list[int] = []
        self.stats = Stats()

    def __iter__(self) -> Iterator[Step]:
        for step in steps_of(self.target, self.loop):
            self.add(step)
            yield step

    def add(self, step: Step):
        self.stats.add(step)
        self.tokens += step.tokens

    def finish(self) -> "Generation":
        """Decode to the end."""
        for _ in self:
            pass
        return self

    @property
    def ended(self) -> str:
        """Why: "eos", "length" (``max_new_tokens``) or a full "context"; "" where it has not."""
        eos = self.tokens and self.tokens[-1] in self.target.config.eos_token_ids
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
    return begin(ready_plan(Options(method, **options), target, draft), target, tokens, draft)


def ready_plan(options: Options, target, draft, batch=1) -> Plan:
    """The Plan for these models and so many prompts at once; ValueError where it cannot be."""
    plan = options.plan(target.config, draft and draft.config)
    if plan.exits:
        from .extras.worth import prepared

        plan = prepared(plan, target, draft, batch)
    return plan


def begin(plan: Plan, target, tokens, draft) -> Generation:
    """The Generation of a Plan; ValueError where the prompt does not fit the target."""
    config, options = target.config, plan.options
    tokens = checked_list(tokens, "the prompt's ids", int, 0, config.vocab_size - 1)
    refuse_long(tokens, config)
    n, size, longest = len(tokens), config.max_position_embeddings, int(options.max_new_tokens)
    began, limit = clock(target.device), min(n + longest, size)
    drafter = make_drafter(plan, target, draft, limit)
    precise = torch.float64 if target.dtype == torch.float64 else torch.float32
    sampler = Sampler(int(options.seed), target.device, precise)
    how = float(options.temperature), float(options.top_p), options.replacement, sampler
    sampling = Sampling(*how, int(options.top_k), plan.coupled)
    loop = new_loop(tokens, Scorer(target, limit, drafter.shape), drafter, sampling, limit)
    ends = {size - n: "context", longest: "length"}  # "length" where both are true
    generation = Generation(target, loop, plan, drafter.exact, ends)
    generation.stats.seconds = clock(target.device) - began  # of the caches; each step adds
    return generation


def refuse_long(tokens, config):
    n, size = len(tokens), config.max_position_embeddings
    refuse(n >= size, f"the prompt has {n} tokens; the target's context of {size} is full")


def make_drafter(plan, target, draft, limit):
    """The drafter of a plan, for contexts of at most ``limit`` tokens."""
    drafter = make_draft(plan, target, draft, limit) if plan.exits else NoDraft(target.device)
    if plan.options.init == "target":
        from .extras.roots import TargetRoots

        drafter = TargetRoots(drafter, plan.options.coupled)
    if target.mesh is not None:
        from .extras.parallel import FirstDecides

        drafter = FirstDecides(drafter, target.device)
    return drafter


def make_draft(plan, target, draft, limit):
    """The SortedDraft of a plan; ValueError where draft or datastore do not fit."""
    shape, datastore, table = plan.shape, plan.options.datastore, None
    if plan.exits[0] == 0:
        size, largest = target.config.vocab_size, datastore.largest if datastore else 0
        refuse(largest >= size, f"the datastore has token {largest}, the target has {size}")
        how = plan.thresholds[0], size, target.device, target.dtype
        table = TableExit(datastore, *how)
    rule = LeastProbable(plan.stop)
    if is_decision(plan.stop):
        from .extras.decision import PathStop

        rule = PathStop(plan.stop)
    capacity = limit + max(shape.size, shape.max_slots)
    exits = sorted_exits(plan.exits, plan.thresholds, draft, table, capacity)
    refuse_wide(shape, exits[-1].vocab_size)  # of a draft for few tokens
    worth_sending = None
    if plan.costs:
        from .extras.worth import most_tokens_a_second

        worth_sending = partial(most_tokens_a_second, costs=plan.costs)
    return SortedDraft(exits, shape, rule, target.device, exits[-1].dtype, worth_sending)
