"""Token trees: many continuations of one text, which the target checks in a single pass.

A tree is drafted level by level. A chain is a tree with one node in each level. The text before the
tree is called the context.

    depth  0     1     2     3
           0 ─┬─ 1 ─┬─ 3 ─── 6
              │     └─ 4
              └─ 2 ─── 5 ─── 7

Node 0 is the root: it is the last token of the context. The nodes 1 to N are drafted tokens in the
order in which they were proposed, so parents come before their children. Row i of the target's
logits is about the token that follows node i. A node at depth d is d positions after the root.
Before a tree is sent to the target, its least probable nodes may be left out. The others are then
numbered anew, from 0 to N again.

A cache has entries. The context of n tokens has the entries 0 to n-1, and the last of them is the
root. In the target's cache, node i is entry n-1+i. The draft reads only nodes that are to get
children. They are *expanded*: here 0, 1, 2, 3 and 5. In the draft's caches, the node
``Tree.expanded[i]`` is entry n-1+i.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from .mask import ROOT_ALONE, add_nodes

NO_PARENT = -1  # the parent of the root


@runtime_checkable
class Shape(Protocol):
    """How a tree grows: ``FixedShape``, ``GrowingShape``, or an object of your own.

    Attributes:
        depth: the number of levels below the root.
        capacity: a cache has room for so many nodes besides the root. The target's holds the nodes
            that are sent, and the draft's the nodes that are expanded.
        sends_all: whether all proposed nodes are sent to the target, as ``Rejection`` needs.
    """

    depth: int
    capacity: int
    sends_all: bool

    def width(self, depth: int) -> int:
        """How many children a node at this depth gets."""

    def next_frontier(self, tree: "Tree") -> list[int]:
        """Which nodes of the last level get children, in ascending order."""

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        """Which nodes the target checks, in ascending order: 0, and others with their parents."""


@dataclass(frozen=True)
class FixedShape:
    """The root gets ``widths[0]`` children, each of them gets ``widths[1]``, and so on.

    (1, 1, 1) is a chain of three tokens. (4, 1, 1) is a fork of four chains: such a list is the
    k-config of multi-candidate speculative decoding (arXiv 2401.06706, section 3). All nodes are
    sent.
    """

    widths: tuple[int, ...]

    sends_all = True

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def capacity(self) -> int:
        return sum(accumulate(self.widths, mul))  # (4, 2, 1): 4 + 8 + 8 nodes

    def width(self, depth: int) -> int:
        return self.widths[depth]

    def next_frontier(self, tree: "Tree") -> list[int]:
        return tree.likely_leaves()

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        return list(range(len(tree.tokens)))


@dataclass(frozen=True)
class GrowingShape:
    """A tree that grows where the draft is confident: S2D's draft tree (arXiv 2407.01955).

    As in the authors' code, after EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the ``top_k`` most
    probable nodes of each level get their ``top_k`` best children. In the end the ``size`` most
    probable of all nodes are sent.
    """

    top_k: int
    depth: int
    size: int

    sends_all = False

    def __post_init__(self) -> None:
        for number in (self.top_k, self.depth, self.size):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"a growing tree has whole numbers from 1, not {number!r}")

    @property
    def capacity(self) -> int:
        return max(self.size, self.top_k * (self.depth - 1))  # the last level is not expanded

    def width(self, depth: int) -> int:
        return self.top_k

    def next_frontier(self, tree: "Tree") -> list[int]:
        return most_probable(tree.likely_leaves(), tree.probs, self.top_k)

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        return [0, *most_probable(range(1, len(tree.tokens)), tree.probs, self.size)]


def most_probable(nodes: Iterable[int], probs: list[float], count: int) -> list[int]:
    """The ``count`` most probable ``nodes``, in ascending order.

    A child is never more probable than its parent. Of equally probable nodes the first ones are
    taken, so a parent is taken before its child.
    """
    ranked = sorted(nodes, key=lambda node: probs[node], reverse=True)
    return sorted(ranked[:count])


class Tree:
    """The tree of one step. The top of this file has a picture.

    Attributes:
        depth: the depth of the last level.
        tokens, parents, depths: by node.
        probs: by node, the estimated probability that its path is accepted: the product of the
            estimates for the tokens on the path.
        exit_layers: by node, the number of layers before the exit that proposed it. It is None for
            the root and for nodes that the target proposed.
        ancestors: the ancestor matrix (N+1, N+1), see ``mask.add_nodes``.
        q: by node, the distribution (V,) that its children were drawn from, if the rule tests them
            against it.
        frontier: the nodes that get children next; at first the root.
        expanded: the root, and all nodes that were in the frontier, in the order of the draft's
            caches. A node that was left out is None.
    """

    def __init__(self, context: list[int], shape: Shape, max_depth: int, stop: float = 0.0) -> None:
        """A node whose path is less probable than ``stop`` gets no children."""
        self.context = context
        self.shape = shape
        self.max_depth = min(max_depth, shape.depth)
        self.stop = stop
        self.depth = 0
        self.tokens = [context[-1]]
        self.parents = [NO_PARENT]
        self.depths = [0]
        self.probs = [1.0]
        self.exit_layers: list[int | None] = [None]
        self.ancestors = ROOT_ALONE
        self.q: dict[int, Tensor] = {}
        self.frontier = [0] if self.max_depth > 0 else []
        self.expanded: list[int | None] = [0]

    def add_level(
        self,
        tokens: list[list[int]],
        probs: list[list[float]],
        exit_layer: int | None,
        q: Sequence[Tensor] = (),
    ) -> None:
        """Give the nodes of the frontier children, and choose the next frontier.

        Args:
            tokens: for each node of the frontier, the tokens of its children.
            probs: likewise, the estimated probability that a child is accepted after its parent.
            exit_layer: which exit proposed them, see ``exit_layers``.
            q: for each node of the frontier, what its children were drawn from (V,); or nothing.
        """
        first = len(self.tokens)
        for parent, child_tokens, child_probs in zip(self.frontier, tokens, probs):
            for token, prob in zip(child_tokens, child_probs):
                self.tokens.append(token)
                self.parents.append(parent)
                # Rounding may bring ``prob`` above 1, but no child is to be more probable than its
                # parent.
                self.probs.append(self.probs[parent] * min(prob, 1.0))
        count = len(self.tokens) - first
        self.depth += 1
        self.depths += [self.depth] * count
        self.exit_layers += [exit_layer] * count
        self.ancestors = add_nodes(self.ancestors, self.parents[first:])
        self.q.update(zip(self.frontier, q))
        more = self.depth < self.max_depth
        self.frontier = self.shape.next_frontier(self) if more else []
        self.expanded += self.frontier  # the draft reads them next

    def likely_leaves(self) -> list[int]:
        """The nodes of the last level whose paths are not less probable than ``stop``."""
        nodes = enumerate(zip(self.depths, self.probs))
        return [node for node, (d, prob) in nodes if d == self.depth and prob >= self.stop]

    def prune(self) -> None:
        """Leave out the nodes that the shape does not send. The tree grows no more."""
        kept = self.shape.nodes_to_send(self)
        if len(kept) < len(self.tokens):
            self.restrict_to(kept)

    def restrict_to(self, kept: list[int]) -> None:
        """Leave out all nodes but ``kept``, and number these anew: ``kept[0]`` becomes node 0."""
        number = {node: new for new, node in enumerate(kept)}
        self.parents = [number.get(self.parents[node], NO_PARENT) for node in kept]
        self.tokens = [self.tokens[node] for node in kept]
        self.depths = [self.depths[node] for node in kept]
        self.probs = [self.probs[node] for node in kept]
        self.exit_layers = [self.exit_layers[node] for node in kept]
        self.ancestors = self.ancestors[kept][:, kept]
        self.q = {number[node]: q for node, q in self.q.items() if node in number}
        self.expanded = [number.get(node) for node in self.expanded]

    def children(self, parent: int) -> list[int]:
        """The nodes below the node ``parent``, in the order in which they were proposed."""
        return [node for node, above in enumerate(self.parents) if above == parent]

    def path(self, node: int) -> list[int]:
        """The drafted tokens from the first level down to ``node``; none for the root."""
        nodes = np.flatnonzero(self.ancestors[node]).tolist()
        return [self.tokens[each] for each in nodes[1:]]

    def next_positions(self, nodes: Iterable[int]) -> list[int]:
        """For each of ``nodes``, the position in the text of the token that follows it."""
        return [len(self.context) + self.depths[node] for node in nodes]
