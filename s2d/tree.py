"""Token trees: many continuations of one context, checked by the target in a single pass.

A ``Tree`` grows level by level while it is drafted: a level is what the draft adds at a time, the
children of all nodes of the *frontier*. Then the tree is sent to the target. A chain is a tree with
one node in each level.

One example shows the four numberings that the code uses. The tree has six nodes. The draft expanded
0, 1, 4 and 2, in this order: it ran on them, to propose their children. Node 4 came before 2
because it was more probable, and the children of 2 were too improbable to become nodes. All but
node 3 are sent to the target:

    context ─┬─ 0 ─┬─ 2             node                            0   1   2   3   4   5
             │     └─ 3             slot, among those expanded      0   1   3   ·   2   ·
             └─ 1 ─── 4 ─── 5       place, among those sent         0   1   2   ·   3   4
                                    row of the target's logits      1   2   3   ·   4   5

- A **node** keeps the number with which it was proposed.
- The draft's KV caches hold the context and, after it, the nodes of ``expanded``, one per **slot**.
- The target reads the context and, after it, the nodes of ``sent``, one per **place**. Parents come
  before their children in both lists, and ``part`` gives parents by the place or slot they have.
- The target's logits have N+1 **rows**: row 0 is about the token after the context, and row i + 1
  about the token after the node in place i. The context has the number -1 among nodes, slots and
  places, so that the row after it is -1 + 1 = 0.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Protocol

import numpy as np
from torch import Tensor

from .mask import CONTEXT, ancestor_mask


class Shape(Protocol):
    """How a tree grows: ``FixedShape`` or ``GrowingShape``."""

    widths: tuple[int, ...]  # by level, counted from 0: children of each node that is expanded
    max_entries: int  # most nodes that are sent (target), or expanded (draft) if these are more
    ancestors: np.ndarray | None  # the ancestor mask of the whole tree, if it is known beforehand

    def keeps(self, prob: float, min_prob: float) -> bool:
        """Whether a proposed node becomes part of the tree, by its path's probability."""

    def next_frontier(self, tree: "Tree") -> list[int]:
        """The nodes to expand next; none if drafting is to end."""

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        """The nodes for the target to check, the most probable first if some may be left out."""


@dataclass(frozen=True)
class FixedShape:
    """A shape that is known beforehand: the context gets ``widths[0]`` children, each of these gets
    ``widths[1]``, and so on. So a level is all nodes of one depth.

    (1, 1, 1) is a chain of three, (4, 1, 1) a fork of four chains: the k-config of multi-candidate
    speculative decoding (arXiv 2401.06706, section 3). All nodes are sent. Drafting ends early once
    the product of the levels' confidences is below ``tree.min_prob``.
    """

    widths: tuple[int, ...]

    @property
    def max_entries(self) -> int:
        return sum(accumulate(self.widths, mul))

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Made once, and sliced for every pass ("dynamic sliced mask", arXiv 2409.10644)."""
        parents = []
        level = [CONTEXT]
        for width in self.widths:
            first = len(parents)
            for node in level:
                parents += [node] * width
            level = range(first, len(parents))
        return ancestor_mask(parents)

    def keeps(self, prob: float, min_prob: float) -> bool:
        return True  # its mask counts on all of them

    def next_frontier(self, tree: "Tree") -> list[int]:
        if tree.likelihood < tree.min_prob:
            return []
        last_depth = tree.level_count - 1
        return [node for node, depth in enumerate(tree.depths) if depth == last_depth]

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        return list(range(len(tree.tokens)))


@dataclass(frozen=True)
class GrowingShape:
    """A shape that grows where the draft is confident: S2D's draft tree (arXiv 2407.01955).

    It is drafted in ``depth`` levels. The first one gives the context its ``top_k`` best children.
    Each later one expands the ``top_k`` most probable nodes that were not expanded yet, whatever
    their depth, and gives each its ``top_k`` best children; so its nodes may differ in depth. Paths
    less probable than ``tree.min_prob`` are left out. The ``size`` most probable nodes are sent.
    """

    top_k: int
    depth: int
    size: int

    ancestors = None

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.top_k,) * self.depth

    @property
    def max_entries(self) -> int:
        return max(self.size, self.top_k * self.depth)

    def keeps(self, prob: float, min_prob: float) -> bool:
        return prob > 0.0 and prob >= min_prob

    def next_frontier(self, tree: "Tree") -> list[int]:
        # A node that will not be sent needs no children: they are no more probable than it is.
        expanded = set(tree.expanded)
        waiting = [node for node in self.nodes_to_send(tree) if node not in expanded]
        return waiting[: self.top_k]

    def nodes_to_send(self, tree: "Tree") -> list[int]:
        # Sorting is stable, so that a parent stays ahead of a child that is as probable.
        nodes = range(len(tree.tokens))
        ranked = sorted(nodes, key=lambda node: tree.probs[node], reverse=True)
        return ranked[: self.size]


@dataclass(frozen=True)
class Tried:
    """An exit that was asked to draft a level. The last one drafted it, unless it knew nothing."""

    level: int
    frontier: list[int]  # the nodes it was asked about
    exit_layer: int
    confidence: float


class Tree:
    """The tree of one step; see the picture at the top of this file.

    Attributes:
        tokens, parents, depths: by node; depths count from 0.
        probs: by node, the estimated probability that its path is accepted, the product of what
            rules estimate (``rules.Proposal``). Growing trees choose nodes by it.
        exit_layers: by node, which exit proposed it, by its number of layers; None if the target
            proposed it (roots.py).
        frontier: the nodes to expand next; at first the context alone.
        expanded: the nodes that are or were in the frontier, but not CONTEXT, in the order of their
            slots in the draft's caches.
        sent: the nodes that the target checks, sorted by depth.
        likelihood: the product of the levels' confidences.
        q: for a node or CONTEXT, the distribution (V,) that its children were drawn from, if the
            rule tests them against it.
        began_at, drafted_at: when drafting began and ended, in seconds of ``time.perf_counter``.
        tried: the exits that were asked, in order.
    """

    def __init__(
        self, context: list[int], shape: Shape, max_levels: int, min_prob: float = 0.0
    ) -> None:
        self.context = context
        self.shape = shape
        self.min_prob = min_prob
        self.max_levels = min(max_levels, len(shape.widths))
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.probs: list[float] = []
        self.exit_layers: list[int | None] = []
        self.level_count = 0
        self.likelihood = 1.0
        self.frontier = [CONTEXT] if self.max_levels > 0 else []
        self.expanded: list[int] = []
        self.sent: list[int] = []
        self.q: dict[int, Tensor] = {}
        self.tried: list[Tried] = []
        self.began_at = self.drafted_at = time.perf_counter()

    def add_level(
        self,
        tokens: list[list[int]],
        probs: list[list[float]],
        exit_layer: int | None,
        confidence: float = 1.0,
        q: Sequence[Tensor] = (),
    ) -> None:
        """Give each node of the frontier children, and choose the next frontier.

        Args:
            tokens: of the children, one list for each node of the frontier.
            probs: of each child, the estimated probability that it is accepted after its parent.
            exit_layer: of the exit that proposed them; None: the target did.
            confidence: of the exit in this level.
            q: what the children were drawn from (V,), one for each node of the frontier, or none.
        """
        self.q.update(zip(self.frontier, q))
        for parent, own_tokens, own_probs in zip(self.frontier, tokens, probs):
            depth = 0 if parent == CONTEXT else self.depths[parent] + 1
            parent_prob = 1.0 if parent == CONTEXT else self.probs[parent]
            for token, prob in zip(own_tokens, own_probs):
                path_prob = parent_prob * prob
                if self.shape.keeps(path_prob, self.min_prob):
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self.depths.append(depth)
                    self.probs.append(path_prob)
                    self.exit_layers.append(exit_layer)
        self.level_count += 1
        self.likelihood *= confidence
        self.frontier = []
        if self.level_count < self.max_levels:
            self.frontier = self.shape.next_frontier(self)
        self.expanded += self.frontier

    def next_positions(self, nodes: list[int]) -> list[int]:
        """The positions of the tokens that follow each of ``nodes`` or CONTEXT."""
        n = len(self.context)
        return [n if node == CONTEXT else n + self.depths[node] + 1 for node in nodes]

    def part(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """The tokens of ``nodes``, and their parents by place in this list."""
        place_of = {node: place for place, node in enumerate(nodes)}
        place_of[CONTEXT] = CONTEXT
        tokens = [self.tokens[node] for node in nodes]
        return tokens, [place_of[self.parents[node]] for node in nodes]

    def slots(self, accepted: list[int]) -> list[int]:
        """Places of accepted nodes -> the slots of those that are in ``expanded``."""
        slot_of = {node: slot for slot, node in enumerate(self.expanded)}
        nodes = [self.sent[place] for place in accepted]
        return [slot_of[node] for node in nodes if node in slot_of]

    def path(self, node: int) -> list[int]:
        """The tokens from the first level down to ``node``."""
        tokens = []
        while node != CONTEXT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]
