"""What can be asked for: options, their defaults and their checks, in one place.

A method is a choice of draft. ``ar`` has none: it is plain, autoregressive decoding. ``sd`` drafts
a chain from one exit, and ``s2d`` from sorted exits. ``mcsd`` and ``s2d-tree`` do so with trees.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

from .draft import DecisionModel
from .model import THRESHOLD, Drafting, LlamaConfig
from .ngram.costs import MIN_PROB, best_node_count, min_paying_prob
from .ngram.table import Table
from .tree import FixedShape, GrowingShape, Shape

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
CHAINS = ("sd", "s2d")
TREES = ("mcsd", "s2d-tree")
SORTED = ("s2d", "s2d-tree")
MAX_NODES = 1024  # of a tree: a mask takes this number squared
MCSD_TREE = (4, 2, 2, 1)  # the k-config of arXiv 2401.06706
TABLE_THRESHOLD = 0.9  # of exit 0 before exits with layers, which know more; tuned on miniatures


# How exit 0 drafts alone; tuned on SmolLM2-135M, 48 Spec-Bench prompts.
TABLE_ALONE = Drafting(exits=(0,), thresholds=(0.0,), length=4, stop=0.03, tree=(6, 7, 7))


@dataclass(frozen=True)
class Options:
    """The options of a generation. ``resolved`` gives what was not set its default.

    Attributes:
        method: one of METHODS. By default ``s2d``; but ``s2d-tree`` if ``tree`` is given, or if
            exit 0 drafts alone, ``coupled``, without ``draft_length``.
        max_new_tokens: the answer ends there, if not before.
        temperature: 0 is greedy.
        top_p: the share of the probability that nucleus sampling keeps; 1 keeps all tokens.
        top_k: the number of tokens that may be sampled; 0 keeps all.
        seed: of all random numbers.
        exits: the numbers of layers after which the draft may predict; 0 is the n-gram table.
        thresholds: one per exit, a confidence above it is enough. The last exit always drafts,
            whatever its own is.
        draft_length: tokens in a chain.
        tree: children of each node, by level, such as (4, 2, 2, 1), or a shape. Resolved, it is
            always a shape, also of chains.
        init: "target" gives each tree its first level from the target (roots.py).
        stop: a probability. Chains and fixed trees end when the product of their levels'
            confidences is below it; of growing trees it leaves out less probable paths.
        decision: a decision model that may end drafting earlier (decision.py).
        coupled: draft and target share their noise, so that one seed gives one text; False is
            rejection sampling, as in the papers (``--rejection``).
        datastore: what exit 0 knows besides the text (ngram/datastore.py).
        node_count: how many nodes of a growing tree to send, see ``SortedDraft``.
    """

    method: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    exits: Sequence[int] | None = None
    thresholds: Sequence[float] | None = None
    draft_length: int | None = None
    tree: Sequence[int] | Shape | None = None
    init: str = "draft"
    stop: float | None = None
    decision: DecisionModel | None = None
    coupled: bool = True
    datastore: Table | None = None
    node_count: Callable[[list[float]], int] | None = None

    def resolved(
        self,
        target_config: LlamaConfig,
        draft_config: LlamaConfig | None = None,
        drafting: Drafting | None = None,
        costs: list[float] | None = None,
    ) -> "Options":
        """These options with nothing left to decide. Raises ValueError for what cannot be run.

        Args:
            target_config: of the target.
            draft_config, drafting: of the draft model; without one, exit 0 drafts alone.
            costs: seconds of a target pass over 1, 2, ... positions, if they are known; see
                ``may_need_costs``.
        """
        asked = self.checked()
        if self.method == "ar":
            return replace(asked, exits=(), thresholds=(), tree=FixedShape(()), stop=0.0)
        has_draft_model = draft_config is not None
        vocab_size = target_config.vocab_size
        if has_draft_model and draft_config.vocab_size != vocab_size:
            sizes = f"{draft_config.vocab_size} and {vocab_size} tokens"
            raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")
        if self.table_alone(has_draft_model):
            drafting = TABLE_ALONE
        depth = draft_config.num_hidden_layers if has_draft_model else 0
        exits = self.resolved_exits(drafting, depth)
        method = self.resolved_method(exits)
        if len(exits) > 1 and method not in SORTED:
            raise ValueError(f"method {method} has one exit, not {list(exits)}; use s2d")
        if not self.may_need_costs(has_draft_model):
            costs = None
        tree = self.resolved_tree(method, drafting, vocab_size)
        return replace(
            asked,
            method=method,
            exits=exits,
            thresholds=self.resolved_thresholds(exits, drafting),
            tree=tree,
            stop=self.resolved_stop(method, exits, drafting, costs),
            node_count=self.resolved_node_count(tree, costs),
        )

    def table_alone(self, has_draft_model: bool) -> bool:
        """Whether exit 0 drafts alone."""
        return not has_draft_model or (self.exits is not None and list(self.exits) == [0])

    def may_need_costs(self, has_draft_model: bool) -> bool:
        """Whether ``resolved`` may look at costs: they are measured once, which takes a moment.

        They choose ``stop`` and ``node_count`` where exit 0 drafts alone, unless a stop was given.
        They are not used under rejection sampling, whose text depends on what is drafted and must
        not depend on clocks; nor with ``init="target"``, since the first level then has no
        estimated probabilities.
        """
        if self.method == "ar" or not self.table_alone(has_draft_model) or not self.coupled:
            return False
        return self.stop is None and self.init == "draft"

    def checked(self) -> "Options":
        """These options with plain Python numbers; ValueError for what no models could run."""
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; expected {', '.join(METHODS)}")
        if self.init not in ("draft", "target"):
            raise ValueError(f"init is 'draft' or 'target', not {self.init!r}")
        if self.tree is not None and self.method not in (None, *TREES):
            raise ValueError(f"method {self.method} drafts no tree; use mcsd or s2d-tree")
        if self.draft_length is not None and self.method not in (None, *CHAINS):
            raise ValueError(f"method {self.method} drafts no chain; use sd or s2d")
        if self.tree is not None and self.draft_length is not None:
            raise ValueError("a tree has its own depth; give tree or draft_length, not both")
        if self.node_count is not None and self.init == "target":
            raise ValueError("node_count and init='target' do not go together")
        temperature = check_number("temperature", self.temperature, 0, 1e38)
        if temperature != 0:
            check_number("temperature, if not 0", temperature, 1e-6, 1e38)
        for name in ("exits", "thresholds", "tree"):
            value = getattr(self, name)
            is_shape = isinstance(value, (FixedShape, GrowingShape))
            if not (value is None or is_shape or isinstance(value, Iterable)):
                raise ValueError(f"{name}: expected a list, got {value!r}")
        return replace(
            self,
            max_new_tokens=check_whole("max_new_tokens", self.max_new_tokens, 1),
            temperature=temperature,
            top_p=check_number("top_p", self.top_p, 1e-40, 1),
            top_k=check_whole("top_k", self.top_k, 0),
            seed=check_whole("seed", self.seed, 0),
        )

    def resolved_exits(self, drafting: Drafting, depth: int) -> tuple[int, ...]:
        """``depth``: the number of the draft model's layers."""
        exits = self.exits
        if exits is None:
            several = self.method in (None, *SORTED)
            exits = drafting.exits if several else drafting.exits[-1:]
        what = f"exits of {depth} draft layers"
        exits = tuple(check_whole(what, exit_layer, 0, depth) for exit_layer in exits)
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must increase, got {list(exits)}")
        return exits

    def resolved_thresholds(self, exits: tuple[int, ...], drafting: Drafting) -> tuple[float, ...]:
        if self.thresholds is not None:
            if len(self.thresholds) != len(exits):
                raise ValueError(f"{len(exits)} exits, but {len(self.thresholds)} thresholds")
            return tuple(check_number("thresholds", each, 0, 1) for each in self.thresholds)
        trained = dict(zip(drafting.exits, drafting.thresholds))
        as_trained = tuple(exit_layer for exit_layer in exits if exit_layer > 0) == drafting.exits
        thresholds = []
        for exit_layer in exits[:-1]:
            threshold = trained.get(exit_layer, THRESHOLD)
            if exit_layer == 0:
                threshold = TABLE_THRESHOLD
            # After an exit with a threshold of 0 no deeper one is reached. As trained, that is
            # meant. But if 2, 3, 6 are asked for and 2, 3 were trained, it is only left from there.
            if threshold == 0 and not as_trained:
                threshold = THRESHOLD
            thresholds.append(threshold)
        return (*thresholds, 0.0)

    def resolved_method(self, exits: tuple[int, ...]) -> str:
        if self.method is not None:
            return self.method
        # Exit 0 alone costs next to nothing, so it drafts a growing tree unless a chain is asked
        # for. Rejection sampling does not go with growing trees (rules.py).
        grows = exits == (0,) and self.coupled and self.draft_length is None
        return "s2d-tree" if self.tree is not None or grows else "s2d"

    def resolved_tree(self, method: str, drafting: Drafting, vocab_size: int) -> Shape:
        if method in CHAINS:
            length = drafting.length if self.draft_length is None else self.draft_length
            return FixedShape((1,) * check_whole("draft_length", length, 1, MAX_NODES))
        tree = self.tree
        if tree is None:
            tree = MCSD_TREE if method == "mcsd" else GrowingShape(*drafting.tree)
        if isinstance(tree, GrowingShape):
            if not self.coupled:
                raise ValueError(
                    "rejection sampling needs drawn children: a chain or a tree like 4,2,2,1"
                )
            numbers = [check_whole("tree", each, 1, MAX_NODES) for each in astuple(tree)]
            tree = GrowingShape(*numbers)
        else:
            widths = tree.widths if isinstance(tree, FixedShape) else tree
            tree = FixedShape(tuple(check_whole("tree", each, 1, MAX_NODES) for each in widths))
        check_whole("nodes of a tree", tree.max_entries, 1, MAX_NODES)
        check_whole("children of a node", max(tree.widths), 1, vocab_size)
        return tree

    def resolved_stop(
        self, method: str, exits: tuple[int, ...], drafting: Drafting, costs: list[float] | None
    ) -> float:
        if self.decision is not None and exits[0] == 0:
            raise ValueError("a decision model judges layers; exit 0 has none")
        if self.stop is not None:
            return check_number("stop", self.stop, 0, 1)
        if costs is not None:
            return min(1.0, max(MIN_PROB, min_paying_prob(costs)))
        if self.decision is None and (method in CHAINS or exits == (0,)):
            return drafting.stop
        return 0.0

    def resolved_node_count(
        self, tree: Shape, costs: list[float] | None
    ) -> Callable[[list[float]], int] | None:
        if not isinstance(tree, GrowingShape):
            if self.node_count is not None:
                raise ValueError("node_count is for growing trees; other trees are sent whole")
            return None
        if self.node_count is None and costs is not None:
            return partial(best_node_count, costs=costs)
        return self.node_count


def check_number(what: str, value: float, low: float, high: float) -> float:
    """``value`` as a float; ValueError if it is no number from ``low`` to ``high``."""
    try:
        inside = low <= value <= high
    except (TypeError, ValueError, RuntimeError):  # a text, None, an array or a tensor
        inside = False
    if not inside:
        raise ValueError(f"{what}: expected a number from {low} to {high}, got {value!r}")
    return float(value)


def check_whole(what: str, value: int, low: int, high: int = 2**63 - 1) -> int:
    """As ``check_number``, but an int; 8.0 and NumPy's 8 are whole as well."""
    check_number(what, value, low, high)
    if int(value) != value:
        raise ValueError(f"{what}: expected a whole number from {low} to {high}, got {value!r}")
    return int(value)
