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
Before a tree is sent to the target, its least probable nodes may be left out: the target gets a new
tree, whose nodes are numbered from 0 to N again.

A cache has entries. The context of n tokens has the entries 0 to n-1, and the last of them is the
root. In the target's cache, node i is entry n-1+i. The draft reads only nodes that are to get
children. They are *expanded*: here 0, 1, 2, 3 and 5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from .mask import ROOT_ALONE, add_nodes

NO_NODE = -1
TARGET = -1  # in the place of an exit's number: the target chose this token


class Proposal(NamedTuple):
    """Children for each of R nodes: the best first, or in the order in which they were drawn."""

    tokens: list[list[int]]  # R lists; some are shorter where few tokens are possible
    # Likewise: estimates that a child is accepted after its parent. For a drawn child, q is taken,
    # an underestimate. Drafting stops and trees grow by them. The verification never uses them.
    probs: list[list[float]]
    q: Sequence[Tensor] = ()  # R times (V,): what the children were drawn from, if they were drawn


class Tree(NamedTuple):
    """The tree of one step. Nothing in it changes: whatever adds nodes makes a new tree."""

    context: tuple[int, ...]  # the text before the drafted nodes
    tokens: tuple[int, ...]  # by node, as are the next five
    parents: tuple[int, ...] = (NO_NODE,)
    depths: tuple[int, ...] = (0,)
    probs: tuple[float, ...] = (1.0,)  # the product of the estimates for the tokens on the path
    exit_layers: tuple[int, ...] = (TARGET,)  # the exit that drafted it, by its number of layers
    q: tuple[Tensor | None, ...] = (None,)  # (V,): what the node was drawn from, if it was drawn
    ancestors: np.ndarray = ROOT_ALONE  # (N+1, N+1): row i has node i and its ancestors
    # Nodes that got children, in the order of the draft's caches: the one at place i has the entry
    # n-1+i there. A node that is not sent is NO_NODE.
    expanded: tuple[int, ...] = ()
    depth: int = 0  # the number of levels that were drafted

    @classmethod
    def root(cls, context: Sequence[int]) -> "Tree":
        """The tree after a ``context`` (ids) that has no drafted node yet."""
        return cls(tuple(context), tokens=(context[-1],))

    def leaves(self, least: float, eos_token_ids: Sequence[int]) -> list[int]:
        """The nodes of the last level that may get children.

        Their paths have a probability of ``least`` or more, and no drafted EOS at the end.
        """
        last_level = [node for node, depth in enumerate(self.depths) if depth == self.depth]
        probable = [node for node in last_level if self.probs[node] >= least]
        return [node for node in probable if node == 0 or self.tokens[node] not in eos_token_ids]

    def add_level(self, nodes: Sequence[int], proposal: Proposal, exit_layer: int) -> "Tree":
        """A tree in which R ``nodes`` of the last level have the children of ``proposal``."""
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        q: list[Tensor | None] = []
        rows = proposal.q or [None] * len(nodes)
        for node, children, estimates, row in zip(nodes, proposal.tokens, proposal.probs, rows):
            tokens += children
            parents += [node] * len(children)
            # By rounding, an estimate may be above 1. No child is more probable than its parent.
            probs += [self.probs[node] * min(estimate, 1.0) for estimate in estimates]
            q += [row] * len(children)
        return Tree(
            context=self.context,
            tokens=self.tokens + tuple(tokens),
            parents=self.parents + tuple(parents),
            depths=self.depths + (self.depth + 1,) * len(tokens),
            probs=self.probs + tuple(probs),
            exit_layers=self.exit_layers + (exit_layer,) * len(tokens),
            q=self.q + tuple(q),
            ancestors=add_nodes(self.ancestors, parents),
            expanded=(*self.expanded, *nodes),
            depth=self.depth + 1,
        )

    def prune(self, kept: Sequence[int]) -> "Tree":
        """A tree of the nodes ``kept``, numbered anew in their order."""
        if len(kept) == len(self.tokens):
            return self
        number = {node: new for new, node in enumerate(kept)}
        ancestors = self.ancestors[np.ix_(kept, kept)]
        ancestors.flags.writeable = False
        return self._replace(
            tokens=tuple(self.tokens[node] for node in kept),
            parents=tuple(number.get(self.parents[node], NO_NODE) for node in kept),
            depths=tuple(self.depths[node] for node in kept),
            probs=tuple(self.probs[node] for node in kept),
            exit_layers=tuple(self.exit_layers[node] for node in kept),
            q=tuple(self.q[node] for node in kept),
            ancestors=ancestors,
            expanded=tuple(number.get(node, NO_NODE) for node in self.expanded),
        )

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


class Shape(Protocol):
    """How a tree grows: ``FixedShape``, ``GrowingShape``, or an object of your own."""

    depth: int  # the number of levels below the root
    prunes: bool  # whether nodes may be left unsent: then a rule must not draw (rules.Rejection)

    def frontier(self, tree: Tree, leaves: list[int]) -> list[int]:
        """Which of the ``leaves``, nodes of the last level, get children: in ascending order."""

    def width(self, tree: Tree, node: int) -> int:
        """How many children a ``node`` of the frontier gets."""

    def sent(self, tree: Tree) -> list[int]:
        """If the shape prunes: the nodes to send, ascending: 0, and others with parents."""


@dataclass(frozen=True)
class FixedShape:
    """The root gets ``widths[0]`` children, each of them gets ``widths[1]``, and so on.

    (1, 1, 1) is a chain of three tokens. (4, 1, 1) is a fork of four chains: such a list is the
    k-config of multi-candidate speculative decoding (arXiv 2401.06706, section 3). All nodes are
    sent.
    """

    widths: tuple[int, ...]
    prunes = False

    @property
    def depth(self) -> int:
        return len(self.widths)

    def frontier(self, tree: Tree, leaves: list[int]) -> list[int]:
        return leaves

    def width(self, tree: Tree, node: int) -> int:
        return self.widths[tree.depths[node]]


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
    prunes = True

    def frontier(self, tree: Tree, leaves: list[int]) -> list[int]:
        return most_probable(leaves, tree.probs, self.top_k)

    def width(self, tree: Tree, node: int) -> int:
        return self.top_k

    def sent(self, tree: Tree) -> list[int]:
        return [0, *most_probable(range(1, len(tree.probs)), tree.probs, self.size)]


def most_probable(nodes: Iterable[int], probs: Sequence[float], count: int) -> list[int]:
    """The ``count`` most probable ``nodes``, in ascending order.

    A child is never more probable than its parent. Of equally probable nodes the first ones are
    taken, so a parent is taken before its child.
    """
    ranked = sorted(nodes, key=lambda node: probs[node], reverse=True)
    return sorted(ranked[:count])
