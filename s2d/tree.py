"""Token trees: many continuations of one context, checked by the target in a single pass.

A ``Tree`` grows level by level while it is drafted. Its shape is known beforehand (``KConfig``; a
chain has one child per node) or grows where the draft is confident (``Dynamic``).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np
import torch

CONTEXT = -1  # the parent of a tree's first level: the context itself


def ancestor_mask(parents: list[int]) -> np.ndarray:
    """Parents (N,), each before its children -> (N, N) bool: which node attends to which.

    A node attends to all that its parent attends to, and to itself.

        context ─┬─ 0 ─┬─ 2 ─── 4        node  parent   attends to
                 │     └─ 3                0     -1     0 . . . .
                 └─ 1                      1     -1     . 1 . . .
                                           2      0     0 . 2 . .
                                           3      0     0 . . 3 .
                                           4      2     0 . 2 . 4
    """
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent != CONTEXT:
            mask[node] |= mask[parent]
    return mask


def is_chain(parents: list[int]) -> bool:
    """Whether each node follows the one before it."""
    return parents == list(range(-1, len(parents) - 1))


def positions_and_mask(start: int, n: int, parents: list[int], model, ancestors=None):
    """Position ids (T,) and mask (T, S+T) of a context of ``n`` tokens and N nodes behind it.

    ``model`` has seen the first S = ``start`` of these n + N. ``ancestors`` is the ancestor mask of
    a tree that begins with these nodes, if it is known. With the first three nodes of the tree
    above behind the context a b c d e, for a model that has seen a b c d:

                a b c d   e 0 1 2
          e     x x x x   x . . .      position 4
          0     x x x x   x x . .               5
          1     x x x x   x . x .               5
          2     x x x x   x x . x               6

    Rows of the context are causal. A node sees the context and its ancestors, and its position is
    one behind its parent's. Positions None: start, start + 1, ... Mask None: causal attention from
    an empty cache, or one row that sees everything.
    """
    end = n + len(parents)
    chain = is_chain(parents)
    if chain and (start == 0 or end - start == 1):
        return None, None
    visible = np.tri(end - start, end, k=start, dtype=bool)
    positions = None
    if not chain:
        if ancestors is None:
            ancestors = ancestor_mask(parents)
        first = max(0, start - n)  # the nodes before it are in the cache already
        visible[n + first - start :, n:] = ancestors[first : len(parents), : len(parents)]
        depths = ancestors[: len(parents)].sum(axis=1) - 1
        positions = np.concatenate((np.arange(n), n + depths))[start:]
        positions = torch.from_numpy(positions).to(model.device)
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=model.device)
    return positions, mask.masked_fill_(torch.from_numpy(~visible).to(model.device), -torch.inf)


class KConfig:
    """A shape known beforehand, MCSD's k-config: ``widths[d]`` children per node of level d - 1.

    (1, 1, 1) is a chain of three, (4, 1, 1) a fork of four chains (arXiv 2401.06706, section 3).
    All nodes are sent, level by level. No level is added once the product of the levels'
    confidences is below ``tree.min_prob``.
    """

    fixed = True

    def __init__(self, widths: tuple[int, ...]):
        self.widths = widths
        self.max_nodes = sum(accumulate(widths, mul))  # in a KV cache at once

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Made once, and sliced for every pass ("dynamic sliced mask", arXiv 2409.10644)."""
        parents, above = [], [CONTEXT]
        for width in self.widths:
            first = len(parents)
            parents += [node for node in above for _ in range(width)]
            above = range(first, len(parents))
        return ancestor_mask(parents)

    def next_frontier(self, tree) -> list[int]:
        """The nodes to expand next."""
        if tree.likelihood < tree.min_prob:
            return []
        return [node for node, depth in tree.depths.items() if depth == tree.level - 1]


@dataclass(frozen=True)
class Dynamic:
    """A tree that grows where the draft is confident (S2D's draft tree, arXiv 2407.01955).

    Each of ``depth`` rounds (levels) expands ``top_k`` more nodes, the most probable of any depth;
    the first expands the context. A node gets its ``top_k`` best children, but for paths less
    probable than ``tree.min_prob``. The most probable ``size`` nodes are sent.
    """

    top_k: int
    depth: int
    size: int

    fixed, ancestors = False, None
    widths = property(lambda self: (self.top_k,) * self.depth)
    max_nodes = property(lambda self: max(self.size, self.top_k * self.depth))

    def best(self, tree) -> list[int]:
        """The nodes that can be sent to the target, the most probable first."""
        ranked = sorted(range(len(tree.tokens)), key=tree.probs.__getitem__, reverse=True)
        return ranked[: self.size]

    def next_frontier(self, tree):
        # Only nodes that can be sent: a child is at most as probable as its parent.
        return [node for node in self.best(tree) if node not in tree.expanded][: self.top_k]


class Tree:
    """The tree of a step: drafted level by level, then sent to the target.

    A node keeps the number it was proposed with. The draft's KV caches hold ``expanded``, at its
    end the frontier (unless that is the context), the target sees ``sent``; ``part`` numbers
    parents anew for either. With top_k = 2, after rounds for the context and for 0 and 1:

        context ─┬─ 0 ─┬─ 2 ─ ...     node              0   1   2   3   4   5
                 │     └─ 3           parent           -1  -1   0   0   1   1
                 └─ 1 ─┬─ 4 ─ ...     part([0, 1, 2, 4]) has the parents -1, -1, 0, 1
                       └─ 5

    By node: tokens, parents, exits (layers of the draft; None: a root from the target), depths
    (from 0) and probs (by which paths are ranked, see ``choose_children``). ``frontier``: the nodes
    to expand next, at first the context. ``likelihood``: the product of the levels' confidences.
    ``q``: per level the distributions (R, V) its tokens were drawn from, if the target tests them.
    """

    def __init__(self, context: list[int], shape, max_levels: int, min_prob: float = 0.0):
        self.context, self.shape, self.min_prob = context, shape, min_prob
        self.max_levels = min(max_levels, len(shape.widths))
        self.tokens, self.parents, self.exits = [], [], []
        self.depths, self.probs = {CONTEXT: -1}, {CONTEXT: 1.0}
        self.level, self.likelihood, self.q = 0, 1.0, []
        self.frontier = [CONTEXT] if self.max_levels > 0 else []
        self.expanded, self.sent = [], []

    def add_level(self, tokens, probs, exit, confidence=1.0):
        """Give each node of the frontier children: ``tokens`` and ``probs``, a list per node."""
        for parent, own_tokens, own_probs in zip(self.frontier, tokens, probs):
            for token, prob in zip(own_tokens, own_probs):
                node, prob = len(self.tokens), self.probs[parent] * prob
                if self.shape.fixed or prob > 0.0 and prob >= self.min_prob:
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self.exits.append(exit)
                    self.depths[node], self.probs[node] = self.depths[parent] + 1, prob
        self.level += 1
        self.likelihood *= confidence
        self.frontier = self.shape.next_frontier(self) if self.level < self.max_levels else []
        self.expanded += self.frontier

    def send(self, nodes_to_send=None):
        """Choose the nodes that the target checks; ``nodes_to_send``: see Options."""
        nodes = range(len(self.tokens))
        if not self.shape.fixed:
            nodes = self.shape.best(self)
            if nodes_to_send is not None:
                nodes = nodes[: nodes_to_send([self.probs[node] for node in nodes])]
        self.sent = sorted(nodes, key=lambda node: (self.depths[node], node))

    def part(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """The tokens of ``nodes`` and their parents, by place among these."""
        place = {CONTEXT: CONTEXT} | {node: i for i, node in enumerate(nodes)}
        parents = [place[self.parents[node]] for node in nodes]
        return [self.tokens[node] for node in nodes], parents

    def path(self, node: int) -> list[int]:
        """The tokens from the first level down to ``node``."""
        path = []
        while node != CONTEXT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]
