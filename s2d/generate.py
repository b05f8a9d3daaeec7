"""``generate``: options become a decoder, and its steps become an answer.

A method is a choice of draft: ``ar`` has none; ``sd`` drafts a chain from one exit and ``s2d`` from
sorted exits; ``mcsd`` and ``s2d-tree`` draft trees likewise.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from .decode import Decoder
from .draft import LayerExit, SortedDraft
from .model import Llama, LlamaConfig
from .sampling import Sampling
from .tree import Dynamic, KConfig

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
CHAINS, TREES, SORTED = ("sd", "s2d"), ("mcsd", "s2d-tree"), ("s2d", "s2d-tree")
MAX_NODES = 1024  # of a tree: masks take this number squared
THRESHOLD = 0.5  # of an exit that has none of its own: the published one
TABLE_THRESHOLD = 0.9  # of exit 0 before layers, which know more than it does; tuned on mini-*
# In the place of a draft's config, for exit 0 alone; tuned on SmolLM2-135M, 48 Spec-Bench prompts.
TABLE_ALONE = SimpleNamespace(
    num_hidden_layers=0,
    exit_layers=(0,),
    thresholds=(0.0,),
    draft_length=4,
    draft_stop=0.03,
    draft_tree=(6, 7, 7),
)


@dataclass(frozen=True)
class Options:
    """The options of a generation. None: a default by draft and method, see ``resolved``."""

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
    stop: float | Callable | None = None  # min_prob of KConfig and Dynamic, or a function
    coupled: bool = True  # one seed, one text; False: rejection sampling above T = 0
    datastore: Any = None  # what exit 0 knows besides the text (extras/datastore.py)
    nodes_to_send: Callable | None = None  # of a growing tree (extras/node_count.py)

    def check(self):
        """Raise ValueError for what is wrong whatever the models are."""
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; expected {', '.join(METHODS)}")
        if self.init not in ("draft", "target"):
            raise ValueError(f"init is 'draft' or 'target', not {self.init!r}")
        if self.tree is not None and self.method not in TREES:
            raise ValueError(f"method {self.method} drafts no tree; use mcsd or s2d-tree")
        if self.draft_length is not None and self.method not in CHAINS:
            raise ValueError(f"method {self.method} drafts no chain; use sd or s2d")
        check_range("max_new_tokens", self.max_new_tokens, 1)
        if self.temperature != 0:
            check_range("temperature, if not 0", self.temperature, 1e-6, 1e38)
        check_range("top_p", self.top_p, 1e-40, 1)
        check_range("top_k", self.top_k, 0)
        check_range("seed", self.seed, 0)

    def resolved(self, target: LlamaConfig, draft: LlamaConfig | None = None) -> "Options":
        """With all defaults in place; without a ``draft``, exit 0 drafts. May raise ValueError."""
        self.check()
        if self.method == "ar":
            return replace(self, exits=(), thresholds=())
        if draft is None:
            draft = TABLE_ALONE
        elif draft.vocab_size != target.vocab_size:
            sizes = f"{draft.vocab_size} and {target.vocab_size} tokens"
            raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")
        exits = self.resolved_exits(draft)
        thresholds = self.resolved_thresholds(exits, draft)
        if exits == (0,):
            draft = TABLE_ALONE
        stop = self.stop
        if stop is None:
            stop = draft.draft_stop if self.method in CHAINS or exits == (0,) else 0.0
        elif not callable(stop):
            check_range("stop", stop, 0, 1)
        elif exits[0] == 0:
            raise ValueError("a decision model judges layers; exit 0 has none")
        options = replace(self, exits=exits, thresholds=thresholds, stop=stop)
        if self.method in CHAINS:
            length = draft.draft_length if self.draft_length is None else self.draft_length
            check_range("draft_length", length, 1, MAX_NODES)
            return replace(options, draft_length=length)
        tree = self.tree
        if tree is None:
            tree = (4, 2, 2, 1) if self.method == "mcsd" else Dynamic(*draft.draft_tree)
        check_tree(tree, self.coupled)
        return replace(options, tree=tree)

    def resolved_exits(self, draft):
        depth, exits = draft.num_hidden_layers, self.exits
        if exits is None:
            own = draft.exit_layers or (depth,)
            exits = own if self.method in SORTED else own[-1:]
        for layer in exits:
            check_range(f"exits of {depth} draft layers", layer, 0, depth)
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must increase, got {list(exits)}")
        if len(exits) > 1 and self.method not in SORTED:
            raise ValueError(f"method {self.method} has one exit, not {list(exits)}; use s2d")
        return tuple(exits)

    def resolved_thresholds(self, exits, draft):
        if self.thresholds is not None:
            for threshold in self.thresholds:
                check_range("thresholds", threshold, 0, 1)
            if len(self.thresholds) != len(exits):
                raise ValueError(f"{len(exits)} exits, but {len(self.thresholds)} thresholds")
            return tuple(self.thresholds)
        known = dict(zip(draft.exit_layers, draft.thresholds))
        if tuple(layer for layer in exits if layer > 0) != draft.exit_layers:
            # With other exits, a threshold of 0 would make those behind it unreachable.
            known = {layer: threshold for layer, threshold in known.items() if threshold > 0}
        known[0] = TABLE_THRESHOLD
        return (*(known.get(layer, THRESHOLD) for layer in exits[:-1]), 0.0)


def check_range(what, value, low, high=2**63 - 1):
    if not low <= value <= high:
        raise ValueError(f"{what}: expected a number from {low} to {high}, got {value!r}")


def check_tree(tree, coupled):
    grows = isinstance(tree, Dynamic)
    for number in astuple(tree) if grows else tree:
        check_range("tree", number, 1, MAX_NODES)
    check_range("nodes of a tree", (tree if grows else KConfig(tree)).max_nodes, 1, MAX_NODES)
    if grows and not coupled:
        raise ValueError("rejection sampling needs drawn children: a chain or a tree like 4,2,2,1")


def generate(target: Llama, tokens: list[int], draft=None, method="s2d", **options) -> Decoder:
    """Continue ``tokens`` as ``target`` alone would; returns the Decoder that has done it.

    ``options``: see Options. Ends at EOS, after ``max_new_tokens`` or where the target's context is
    full. Raises ValueError for anything that cannot be run.
    """
    decoder = start(target, tokens, draft, method, **options)
    for _ in decoder:
        pass
    return decoder


def start(target: Llama, tokens: list[int], draft=None, method="s2d", **options) -> Decoder:
    """As ``generate``, but it has not begun: iterate over it. ``tokens``: a list or 1-D tensor."""
    config = target.config
    options = Options(method, **options).resolved(config, draft and draft.config)
    tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
    size = config.max_position_embeddings
    if not 0 < len(tokens) < size:
        raise ValueError(f"the prompt has {len(tokens)} tokens; expected 1 to {size - 1}")
    if not all(0 <= token < config.vocab_size for token in tokens):
        raise ValueError(f"the prompt's ids are not all within 0..{config.vocab_size - 1}")
    limit = min(len(tokens) + options.max_new_tokens, size)
    sorted_draft = make_draft(options, target, draft, limit) if options.exits else None
    kind = Decoder
    if options.init == "target" and sorted_draft:
        from .extras.roots import RootsDecoder as kind
    return kind(target, sorted_draft, tokens, limit, Sampling(options, target))


def make_draft(options: Options, target: Llama, draft, limit: int) -> SortedDraft:
    """The SortedDraft that resolved ``options`` describe, for contexts up to ``limit`` tokens."""
    if options.method in CHAINS:
        shape = KConfig((1,) * options.draft_length)
    elif isinstance(options.tree, Dynamic):
        shape = options.tree
    else:
        shape = KConfig(options.tree)
    exits, below = [], None
    for layer, threshold in zip(options.exits, options.thresholds):
        if layer == 0:
            from .ngram import TableExit

            exits.append(TableExit(options.datastore, threshold, target.device))
        else:
            below = LayerExit(draft, below, layer, threshold, limit + shape.max_nodes)
            exits.append(below)
    return SortedDraft(exits, shape, options.stop, options.nodes_to_send)
