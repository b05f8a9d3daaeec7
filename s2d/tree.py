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
children. They are *expanded*: here 0, 1, 2, 3 and 5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from .mask import ROOT_ALONE, add_nodes

NO_PARENT = -1  # the parent of the root


@runtime_checkable
class Shape(Protocol):
    """How a tree grows: ``FixedShape``, ``GrowingShape``, or an object of your own."""

    depth: int  # the number of levels below the root
    # The most nodes besides the root that a cache has to hold. The target's cache holds the nodes
    # that are sent, and the draft's those that are expanded.
    capacity: int

    def width(self, depth: int) -> int:
        """How many children a node at this depth gets."""

    def frontier(self, leaves: list[int], probs: list[float]) -> list[int]:
        """Which of the ``leaves``, the nodes of the last level, get children: in ascending order.

        There are no ``leaves`` if drafting has stopped everywhere. ``probs`` has, for all nodes,
        the estimated probability that they are accepted.
        """

    def sent(self, probs: list[float]) -> list[int]:
        """Which of all nodes the target checks, in ascending order: 0, and others with parents."""


@dataclass(frozen=True)
class FixedShape:
    """The root gets ``widths[0]`` children, each of them gets ``widths[1]``, and so on.

    (1, 1, 1) is a chain of three tokens. (4, 1, 1) is a fork of four chains: such a list is the
    k-config of multi-candidate speculative decoding (arXiv 2401.06706, section 3). All nodes are
    sent.
    """

    widths: tuple[int, ...]

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def capacity(self) -> int:
        return sum(accumulate(self.widths, mul))  # (4, 2, 1): 4 + 8 + 8 nodes

    def width(self, depth: int) -> int:
        return self.widths[depth]

    def frontier(self, leaves: list[int], probs: list[float]) -> list[int]:
        return leaves

    def sent(self, probs: list[float]) -> list[int]:
        return list(range(len(probs)))


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

    @property
    def capacity(self) -> int:
        return max(self.size, self.top_k * (self.depth - 1))  # the last level is not expanded

    def width(self, depth: int) -> int:
        return self.top_k

    def frontier(self, leaves: list[int], probs: list[float]) -> list[int]:
        return most_probable(leaves, probs, self.top_k)

    def sent(self, probs: list[float]) -> list[int]:
        return [0, *most_probable(range(1, len(probs)), probs, self.size)]


def most_probable(nodes: Iterable[int], probs: list[float], count: int) -> list[int]:
    """The ``count`` most probable ``nodes``, in ascending order.

    A child is never more probable than its parent. Of equally probable nodes the first ones are
    taken, so a parent is taken before its child.
    """
    ranked = sorted(nodes, key=lambda node: probs[node], reverse=True)
    return sorted(ranked[:count])


class Proposal(NamedTuple):
    """Children for each of R nodes: the best first, or in the order in which they were drawn.

    ``probs`` estimate the probability that a child is accepted after its parent: by the draft's
    probability at temperature 1 if nothing is drawn, by q, or with noise by a rough guess. Drafting
    stops and trees grow by them. The verification never looks at them.
    """

    tokens: list[list[int]]  # R lists; some are shorter where few tokens are possible
    probs: list[list[float]]  # likewise
    q: Sequence[Tensor] = ()  # R times (V,): what the children were drawn from, if they were drawn


class Tree:
    """The tree of one step. The top of this file has a picture."""

    def __init__(self, context: list[int]) -> None:
        self.context = context  # the ids of the text before the tree; the last one is the root
        self.depth = 0  # the number of levels that were drafted, also those that were left out
        # By node:
        self.tokens = [context[-1]]
        self.parents = [NO_PARENT]
        self.depths = [0]
        # The estimated probability that the node's path is accepted: the product of the estimates
        # for the tokens on the path.
        self.probs = [1.0]
        # The number of layers before the exit that proposed it; None if the target did.
        self.exit_layers: list[int | None] = [None]
        self.ancestors = ROOT_ALONE  # (N+1, N+1): row i has node i and its ancestors
        # By node, the distribution (V,) that its children were drawn from, if they were drawn.
        self.q: dict[int, Tensor] = {}
        # The nodes that were given children, in the order of the draft's caches. A node that was
        # left out later is None.
        self.expanded: list[int | None] = []

    def leaves(self, least: float) -> list[int]:
        """The nodes of the last level whose paths have a probability of ``least`` or more."""
        nodes = enumerate(zip(self.depths, self.probs))
        return [node for node, (d, prob) in nodes if d == self.depth and prob >= least]

    def add_level(self, nodes: list[int], proposal: Proposal, exit_layer: int | None) -> None:
        """Give R ``nodes`` of the last level the children that an exit proposed: a new level."""
        first = len(self.tokens)
        for parent, tokens, probs in zip(nodes, proposal.tokens, proposal.probs, strict=True):
            for token, prob in zip(tokens, probs, strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                # By rounding, ``prob`` may be above 1. No child is more probable than its parent.
                self.probs.append(self.probs[parent] * min(prob, 1.0))
        count = len(self.tokens) - first
        self.depth += 1
        self.depths += [self.depth] * count
        self.exit_layers += [exit_layer] * count
        self.ancestors = add_nodes(self.ancestors, self.parents[first:])
        self.q.update(zip(nodes, proposal.q))
        self.expanded += nodes

    def prune(self, kept: list[int]) -> None:
        """Leave out all nodes but ``kept``, and number these anew. A tree with ``q`` keeps all."""
        if len(kept) == len(self.tokens):
            return
        number = {node: new for new, node in enumerate(kept)}
        self.parents = [number.get(self.parents[node], NO_PARENT) for node in kept]
        self.tokens = [self.tokens[node] for node in kept]
        self.depths = [self.depths[node] for node in kept]
        self.probs = [self.probs[node] for node in kept]
        self.exit_layers = [self.exit_layers[node] for node in kept]
        self.ancestors = self.ancestors[kept][:, kept]
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
