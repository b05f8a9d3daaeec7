"""``generate``: options become a decoder, and its steps become an answer.

A method is a choice of draft: ``ar`` has none; ``sd`` drafts a chain from one exit and ``s2d`` from
sorted exits; ``mcsd`` and ``s2d-tree`` draft trees likewise. Here alone the front meets the extras.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch

from .decode import Decoder, Stats, Step, clock, steps
from .draft import DraftConfig, LayerExit, SortedDraft, TableExit
from .model import Llama, LlamaConfig
from .sampling import Sampler, Sampling
from .tree import BestFirst, Dynamic, KConfig

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
CHAINS, TREES, SORTED = ("sd", "s2d"), ("mcsd", "s2d-tree"), ("s2d", "s2d-tree")
USED_BY = {
    "draft_length": CHAINS,
    "tree": TREES,
    "thresholds": SORTED,
    **dict.fromkeys(("exits", "stop", "init", "datastore"), METHODS[1:]),
}
K_CONFIG = (4, 2, 2, 1)
MAX_NODES = 2048  # drafted for one pass: masks take this number squared
MIN_TEMPERATURE = 1e-6  # logits divided by less might not be finite; 0 is greedy
THRESHOLD = 0.5  # of an exit that has none of its own: the published one
# Of exit 0 before layers that know more than it does. Tuned on the miniatures.
TABLE_THRESHOLD = 0.9
# Exit 0 alone: a chain's length, a tree, and the least probable path it follows. Tuned on
# SmolLM2-135M with 48 Spec-Bench prompts.
TABLE_LENGTH, TABLE_TREE, TABLE_STOP = 4, (6, 7, 7), 0.03


@dataclass(frozen=True)
class Options:
    """The options of a generation. None: a default by draft and method, see ``resolved``.

    Raises ValueError for what is wrong whatever the models are, and for what a method does not use.
    """

    method: str = "s2d"  # one of METHODS
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int = 0
    exits: tuple[int, ...] | None = None  # numbers of layers, 0 for the table; "sd", "mcsd": one
    thresholds: tuple[float, ...] | None = None  # one per exit; the last exit always drafts
    draft_length: int | None = None  # of a chain
    tree: tuple[int, ...] | Dynamic | None = None  # children per level, or a growing tree
    init: str = "draft"  # "target": it gives a tree its first level (extras/roots.py)
    stop: Any = None  # a path's least probability, or a decision model (extras/decision.py)
    coupled: bool = True  # one seed, one text; False: rejection sampling above T = 0
    datastore: Any = None  # what exit 0 knows besides the text (extras/datastore.py)
    nodes_to_send: Callable | None = None  # of a growing tree (extras/node_count.py)

    def check(self):
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; expected {', '.join(METHODS)}")
        if self.init not in ("draft", "target"):
            raise ValueError(f"init is 'draft' or 'target', not {self.init!r}")
        for name, methods in USED_BY.items():
            if getattr(self, name) != getattr(Options, name) and self.method not in methods:
                raise ValueError(
                    f"method {self.method} does not use {name}; leave it out, or use "
                    f"{' or '.join(methods)}"
                )
        check_number(self.max_new_tokens, "max_new_tokens", int, low=1)
        if self.temperature != 0:
            check_number(
                self.temperature, "temperature, if not 0", float, low=MIN_TEMPERATURE, high=1e38
            )
        check_number(self.top_p, "top_p", float, low=1e-40, high=1)
        check_number(self.top_k, "top_k", int, low=0)
        check_number(self.seed, "seed", int, low=0)

    def resolved(self, target: LlamaConfig, draft: DraftConfig | None = None) -> "Options":
        """The same with every default in its place, for models of these configs.

        Without a ``draft``, exit 0 drafts alone. Raises ValueError for what cannot be.
        """
        self.check()
        if self.method == "ar":
            return replace(self, exits=(), thresholds=())
        if draft is not None and draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft has {draft.vocab_size} tokens, the target {target.vocab_size}: "
                "they must share one vocabulary"
            )
        exits = self.resolved_exits(draft)
        if self.datastore is not None:
            if 0 not in exits:
                raise ValueError(f"a datastore is for exit 0, not for {list(exits)}")
            if self.datastore.largest >= target.vocab_size:
                raise ValueError(
                    f"the datastore has token {self.datastore.largest}, the target "
                    f"{target.vocab_size} tokens"
                )
        stop = self.stop
        if stop is None:
            stop = self.default_stop(exits, draft)
        elif not is_decision_model(stop):
            check_number(stop, "stop", float, low=0, high=1)
        elif exits[0] == 0:
            raise ValueError("a decision model is asked about layers; exit 0 has none")
        options = replace(
            self, exits=exits, thresholds=self.resolved_thresholds(exits, draft), stop=stop
        )
        if self.method in CHAINS:
            length = self.draft_length
            if length is None:
                length = TABLE_LENGTH if exits == (0,) else draft_default(draft, "draft_length")
            check_number(length, "draft_length", int, low=1, high=MAX_NODES)
            return replace(options, draft_length=length)
        return replace(options, tree=self.resolved_tree(exits, draft, target.vocab_size))

    def resolved_exits(self, draft):
        exits, depth = self.exits, 0
        if draft is not None:
            depth = draft.num_hidden_layers
        if exits is None and depth == 0:
            exits = (0,)
        elif exits is None:
            own = draft_default(draft, "exit_layers") or (depth,)
            exits = own if self.method in SORTED else own[-1:]
        exits = check_numbers(exits, f"exits of {depth} draft layers", int, low=0, high=depth)
        if self.method not in SORTED and len(exits) != 1:
            raise ValueError(
                f"method {self.method!r} drafts from one exit, not {list(exits)}; 's2d' from several"
            )
        if list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must increase, got {list(exits)}")
        return exits

    def resolved_thresholds(self, exits, draft):
        if self.thresholds is not None:
            thresholds = check_numbers(self.thresholds, "thresholds", float, low=0, high=1)
            if len(thresholds) != len(exits):
                raise ValueError(f"{len(exits)} exits need as many thresholds, got {thresholds}")
            return thresholds
        layers = tuple(layer for layer in exits if layer > 0)
        known = {0: TABLE_THRESHOLD}
        if layers and layers == draft_default(draft, "exit_layers"):
            known |= dict(zip(layers, draft.thresholds))
        elif layers:
            # Other exits were asked for: a threshold of 0 would leave none to those behind it.
            own = zip(draft_default(draft, "exit_layers"), draft_default(draft, "thresholds"))
            known |= {layer: threshold for layer, threshold in own if threshold > 0}
        return (*(known.get(layer, THRESHOLD) for layer in exits[:-1]), 0.0)

    def default_stop(self, exits, draft):
        if exits == (0,):
            return TABLE_STOP
        return draft_default(draft, "draft_stop") if self.method in CHAINS else 0.0

    def resolved_tree(self, exits, draft, vocab_size):
        tree = self.tree
        if tree is None and self.method == "mcsd":
            tree = K_CONFIG
        elif tree is None:
            tree = Dynamic(*(TABLE_TREE if exits == (0,) else draft_default(draft, "draft_tree")))
        if isinstance(tree, Dynamic):
            check_numbers(astuple(tree), "tree", int, low=1, high=MAX_NODES)
            shape, widest = tree, tree.top_k
            if not self.coupled:
                raise ValueError(
                    "rejection sampling (coupled=False) needs children that are drawn: a chain or "
                    "a tree of fixed shape, not a growing tree"
                )
        else:
            tree = check_numbers(tree, "tree", int, low=1, high=MAX_NODES)
            shape, widest = KConfig(tree), max(tree)
        if shape.max_nodes > MAX_NODES:
            raise ValueError(f"a tree that drafts {shape.max_nodes} nodes is over {MAX_NODES}")
        if widest > vocab_size:
            raise ValueError(f"a node cannot have {widest} children: there are {vocab_size} tokens")
        return tree


def draft_default(draft, name):
    """What the config of a draft says, or would say by default of a plain Llama's."""
    return getattr(draft, name, getattr(DraftConfig, name))


def is_decision_model(stop) -> bool:
    return isinstance(stop, torch.nn.Module)


class Generation:
    """An answer in the making: iterating over it decodes, a Step at a time.

    tokens: the new ones so far, with EOS last if it was produced
    exact: whether the output follows the target's distribution
    options: the Options in force
    stats: Stats
    """

    def __init__(self, decoder: Decoder, options: Options, exact: bool):
        self.decoder, self.options, self.exact = decoder, options, exact
        self.prompt_length = len(decoder.context)
        self.stats = Stats()

    def __iter__(self) -> Iterator[Step]:
        for step in steps(self.decoder):
            self.stats.add(step)
            yield step

    def finish(self) -> "Generation":
        """Decode to the end."""
        for _ in self:
            pass
        return self

    @property
    def tokens(self) -> list[int]:
        return self.decoder.context[self.prompt_length :]

    @property
    def ended(self) -> str:
        """Why: "eos", "length" (``max_new_tokens``) or a full "context"; "" if it has not."""
        if not self.decoder.ended:
            return ""
        if self.tokens and self.tokens[-1] in self.decoder.target.config.eos_token_ids:
            return "eos"
        return "length" if len(self.tokens) == self.options.max_new_tokens else "context"

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.stats.seconds


def generate(target: Llama, tokens: list[int], draft=None, method="s2d", **options) -> Generation:
    """Continue ``tokens`` as ``target`` alone would; returns the finished Generation.

    ``options``: see Options. Ends at EOS, after ``max_new_tokens`` or where the target's context is
    full. Raises ValueError for anything that cannot be run.
    """
    return start(target, tokens, draft, method, **options).finish()


def start(target: Llama, tokens: list[int], draft=None, method="s2d", **options) -> Generation:
    """As ``generate``, but it has not begun: iterate over it. ``tokens``: a list or 1-D tensor."""
    options = Options(method, **options).resolved(target.config, draft and draft.config)
    config = target.config
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.tolist()
    tokens = check_numbers(tokens, "the prompt's ids", int, low=0, high=config.vocab_size - 1)
    if len(tokens) >= config.max_position_embeddings:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; the target's context of "
            f"{config.max_position_embeddings} is full"
        )
    began = clock(target.device)
    limit = min(len(tokens) + options.max_new_tokens, config.max_position_embeddings)
    sampling = Sampling(
        sampler=Sampler(
            seed=options.seed,
            device=target.device,
            dtype=torch.float64 if target.dtype == torch.float64 else torch.float32,
        ),
        temperature=float(options.temperature),
        top_p=float(options.top_p),
        top_k=options.top_k,
        coupled=options.coupled,
    )
    sorted_draft = make_draft(options, target, draft, limit) if options.exits else None
    kind, exact = Decoder, True
    if options.init == "target":
        from .extras.roots import RootsDecoder

        kind, exact = RootsDecoder, options.coupled or sorted_draft.shape.children_of_context == 1
    generation = Generation(kind(target, sorted_draft, tokens, limit, sampling), options, exact)
    generation.stats.seconds = clock(target.device) - began  # of the caches; each step adds to it
    return generation


def make_draft(options: Options, target: Llama, draft, limit: int) -> SortedDraft:
    """The SortedDraft that resolved ``options`` describe, for contexts up to ``limit`` tokens."""
    if options.method in CHAINS:
        shape = KConfig((1,) * options.draft_length)
    elif not isinstance(options.tree, Dynamic):
        shape = KConfig(options.tree)
    elif options.exits == (0,):
        shape = BestFirst(*astuple(options.tree))
    else:
        shape = options.tree
    exits, below = [], None
    for layer, threshold in zip(options.exits, options.thresholds):
        if layer == 0:
            exits.append(TableExit(options.datastore, threshold, shape.max_children, target.device))
        else:
            below = LayerExit(draft, below, layer, threshold, capacity=limit + shape.max_nodes)
            exits.append(below)
    min_prob, stop = options.stop, None
    if is_decision_model(options.stop):
        from .extras.decision import PathStop

        min_prob, stop = 0.0, PathStop(options.stop)
    return SortedDraft(
        exits,
        shape,
        vocab_size=target.config.vocab_size,
        min_prob=min_prob,
        stop=stop,
        nodes_to_send=options.nodes_to_send,
    )


def check_numbers(values, what: str, kind, low, high=2**63 - 1) -> tuple:
    """``values``, a sequence with at least one, as a tuple of ``kind`` (see ``check_number``)."""
    if not isinstance(values, Sequence) or not values:
        raise ValueError(f"{what}: expected a list with at least one, got {values!r:.60}")
    for value in values:
        check_number(value, what, kind, low=low, high=high)
    return tuple(kind(value) for value in values)


def check_number(value, what: str, kind, low, high=2**63 - 1):
    """ValueError unless ``value`` is a number of ``kind`` (int or float) within low..high."""
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        expected = f"a {'whole ' if kind is int else ''}number from {low} to {high}"
        raise ValueError(f"{what}: expected {expected}, got {value!r:.60}")
