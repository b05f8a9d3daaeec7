"""Token trees: many continuations of one context, checked by the target in a single pass.

A ``Tree`` is drafted level by level. The nodes of a level all have the same depth: they are the
children of the *frontier*, those nodes of the level before on which the draft runs. A chain is a
tree with one node in each level.

    context ─┬─ 0 ─┬─ 2 ─── 5        node                          0   1   2   3   4   5   6
             │     └─ 3              slot in the draft's caches    0   1   2   ·   3   ·   ·
             └─ 1 ─── 4 ─── 6        row of the target's logits    1   2   3   4   5   6   7

- **Nodes** are numbered in the order in which they were proposed, so parents come before children.
  Where a node is asked for, CONTEXT, which is -1, stands for the end of the context.
- The draft's KV caches hold the context and, after it, one **slot** for each node on which the
  draft ran: here 0, 1, 2 and 4.
- Before a tree is sent to the target, its least probable nodes may be left out; the others are then
  numbered anew. The target's logits have N+1 **rows**: row node + 1 is about the token after a
  node, so row 0 about the token after the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np
from torch import Tensor

from .mask import CONTEXT, ancestor_mask


class Shape:
    """How a tree grows. A subclass has the first two attributes and ``width``.

    Attributes:
        depth: the number of levels.
        capacity: never are there more slots than this, and never are more nodes sent.
        sends_all: whether all proposed nodes are sent to the target, as ``Rejection`` needs.
    """

    depth: int
    capacity: int
    sends_all = False

    def width(self, level: int) -> int:
        """How many children each node of the frontier gets, in a level counted from 0."""
        raise NotImplementedError

    def next_frontier(self, tree: "Tree") -> list[int]:
        """The nodes of the last level that get children, in ascending order; none ends drafting."""
        last = tree.level_count - 1
        level = [node for node, depth in enumerate(tree.depths) if depth == last]
        return [node for node in level if tree.probs[node] >= tree.stop]

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        """The nodes for the target to check, in ascending order, each with its parent."""
        return list(range(len(tree.tokens)))

    def ancestors(self, parents: list[int]) -> np.ndarray:
        """The ancestor mask (N, N) of nodes, or of slots, with these ``parents`` (N,)."""
        return ancestor_mask(parents)


@dataclass(frozen=True)
class FixedShape(Shape):
    """The context gets ``widths[0]`` children, each of these gets ``widths[1]``, and so on.

    (1, 1, 1) is a chain of three, (4, 1, 1) a fork of four chains: the k-config of multi-candidate
    speculative decoding (arXiv 2401.06706, section 3). All nodes are sent.
    """

    widths: tuple[int, ...]

    sends_all = True

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def capacity(self) -> int:
        return sum(accumulate(self.widths, mul))

    def width(self, level: int) -> int:
        return self.widths[level]

    @cached_property
    def parents(self) -> list[int]:
        """The parents of all nodes, if each has as many children as it may."""
        parents = []
        level = [CONTEXT]
        for width in self.widths:
            first = len(parents)
            for node in level:
                parents += [node] * width
            level = range(first, len(parents))
        return parents

    @cached_property
    def whole_mask(self) -> np.ndarray:
        return ancestor_mask(self.parents)

    def ancestors(self, parents: list[int]) -> np.ndarray:
        """Made once, and sliced for every pass ("dynamic sliced mask", arXiv 2409.10644)."""
        N = len(parents)
        if parents == self.parents[:N]:
            return self.whole_mask[:N, :N]
        return ancestor_mask(parents)  # some node has fewer children


NO_NODES = FixedShape(())  # the shape of an empty tree


@dataclass(frozen=True)
class GrowingShape(Shape):
    """A shape that grows where the draft is confident: S2D's draft tree (arXiv 2407.01955).

    As in the authors' code, after EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the ``top_k`` most
    probable nodes of each level get their ``top_k`` best children. Of all nodes, the ``size`` most
    probable are sent.
    """

    top_k: int
    depth: int
    size: int

    @property
    def capacity(self) -> int:
        return max(self.size, self.top_k * self.depth)

    def width(self, level: int) -> int:
        return self.top_k

    def next_frontier(self, tree: "Tree") -> list[int]:
        return top_nodes(super().next_frontier(tree), tree.probs, self.top_k)

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        return top_nodes(super().nodes_to_send(tree), tree.probs, self.size)


def top_nodes(nodes: list[int], probs: list[float], count: int) -> list[int]:
    """The ``count`` most probable of ``nodes``, in ascending order.

    A child is no more probable than its parent. Of equally probable nodes the first ones are taken,
    so that a parent is taken before its child.
    """
    ranked = sorted(nodes, key=lambda node: probs[node], reverse=True)
    return sorted(ranked[:count])


class Tree:
    """The tree of one step; see the picture at the top of this file.

    Attributes:
        tokens, parents, depths: by node; depths count from 0.
        probs: by node, the estimated probability that its path is accepted: the product of what
            the rule, or a decision model, estimates for its tokens.
        exit_layers: by node, which exit proposed it, by its number of layers; None if the target
            proposed it (roots.py).
        q: for a node or CONTEXT, the distribution (V,) that its children were drawn from, if the
            rule tests them against it.
        frontier: the nodes that get children next; at first the context alone.
        slots: by node that was in a frontier, its slot in the draft's caches; CONTEXT for CONTEXT.
        slot_tokens, slot_parents: by slot; parents are slots as well.
    """

    def __init__(
        self, context: list[int], shape: Shape, max_levels: int, stop: float = 0.0
    ) -> None:
        """``stop``: a node whose path is less probable gets no children."""
        self.context = context
        self.shape = shape
        self.stop = stop
        self.max_levels = min(max_levels, shape.depth)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.probs: list[float] = []
        self.exit_layers: list[int | None] = []
        self.q: dict[int, Tensor] = {}
        self.level_count = 0
        self.frontier = [CONTEXT] if self.max_levels > 0 else []
        self.slots = {CONTEXT: CONTEXT}  # so that the parents of the first slots are the context
        self.slot_tokens: list[int] = []
        self.slot_parents: list[int] = []

    def add_level(
        self,
        tokens: list[list[int]],
        probs: list[list[float]],
        exit_layer: int | None,
        q: Sequence[Tensor] = (),
    ) -> None:
        """Give each node of the frontier children, and choose the next frontier.

        Args:
            tokens: of the children, one list for each node of the frontier.
            probs: of each child, the estimated probability that it is accepted after its parent.
            exit_layer: of the exit that proposed them; None: the target did.
            q: what the children were drawn from (V,), one for each node of the frontier, or none.
        """
        self.q.update(zip(self.frontier, q))
        for parent, own_tokens, own_probs in zip(self.frontier, tokens, probs):
            parent_prob = 1.0 if parent == CONTEXT else self.probs[parent]
            for token, prob in zip(own_tokens, own_probs):
                self.tokens.append(token)
                self.parents.append(parent)
                self.depths.append(self.level_count)
                # A sum of probabilities may be rounded to more than 1; no child may then be more
                # probable than its parent, or it would be sent without it.
                self.probs.append(parent_prob * min(prob, 1.0))
                self.exit_layers.append(exit_layer)
        self.level_count += 1
        more = self.level_count < self.max_levels
        self.set_frontier(self.shape.next_frontier(self) if more else [])

    def set_frontier(self, nodes: list[int]) -> None:
        """Make ``nodes`` the frontier: each gets the next slot in the draft's caches."""
        self.frontier = nodes
        for node in nodes:
            self.slots[node] = len(self.slot_tokens)
            self.slot_tokens.append(self.tokens[node])
            self.slot_parents.append(self.slots[self.parents[node]])

    def prune(self) -> None:
        """Keep the nodes that the shape sends, numbered anew. The tree grows no more."""
        self.frontier = []
        kept = self.shape.nodes_to_send(self)
        if len(kept) < len(self.tokens):
            self.restrict_to(kept)

    def restrict_to(self, kept: list[int], root: int = CONTEXT) -> None:
        """Keep the nodes ``kept`` below ``root``, which becomes CONTEXT, and number them anew."""
        number = {node: new for new, node in enumerate(kept)}
        number[root] = CONTEXT
        self.parents = [number[self.parents[node]] for node in kept]
        self.tokens = [self.tokens[node] for node in kept]
        self.depths = [self.depths[node] for node in kept]
        self.probs = [self.probs[node] for node in kept]
        self.exit_layers = [self.exit_layers[node] for node in kept]
        self.slots = {number[node]: slot for node, slot in self.slots.items() if node in number}
        self.q = {number[node]: q for node, q in self.q.items() if node in number}

    def children(self, parent: int) -> list[int]:
        """The nodes whose parent is the node ``parent``, or CONTEXT."""
        return [node for node, above in enumerate(self.parents) if above == parent]

    def next_positions(self, nodes: list[int]) -> list[int]:
        """The positions of the tokens that follow each of ``nodes`` or CONTEXT."""
        n = len(self.context)
        return [n if node == CONTEXT else n + self.depths[node] + 1 for node in nodes]

    def path(self, node: int) -> list[int]:
        """The tokens from the first level down to ``node``."""
        tokens = []
        while node != CONTEXT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


def empty_tree(context: list[int]) -> Tree:
    return Tree(context, NO_NODES, max_levels=0)
