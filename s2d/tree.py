"""Token trees: many continuations of one context, checked by the target in a single pass.

A ``Tree`` grows level by level while it is drafted. Its shape is known beforehand (``KConfig``; a
chain is a KConfig with one child per node) or grows where the draft is confident (``Dynamic``).
``positions_and_mask`` is what a model needs to run a context and a tree behind it.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np
import torch
from torch import Tensor

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

    >>> ancestor_mask([-1, -1, 0]).astype(int).tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent != CONTEXT:
            mask[node] |= mask[parent]
    return mask


def is_chain(parents: list[int]) -> bool:
    """Whether each node follows the one before it."""
    return parents == list(range(-1, len(parents) - 1))


def positions_and_mask(
    n: int, parents: list[int], start: int, dtype: torch.dtype, device, ancestors=None
) -> tuple[Tensor | None, Tensor | None]:
    """Position ids (T,) and mask (T, S+T) to run a context of ``n`` tokens and a tree behind it.

    The model has seen ``start`` = S of these n + N positions. ``parents`` are those of the N nodes,
    and ``ancestors`` their ``ancestor_mask`` if it is known. With the first three nodes of the tree
    above behind the context a b c d e, for a model that has seen a b c d:

                a b c d   e 0 1 2
          e     x x x x   x . . .      position 4
          0     x x x x   x x . .               5
          1     x x x x   x . x .               5
          2     x x x x   x x . x               6

    A row of the context is causal. A node sees the context and its ancestors, and its position is
    one behind its parent's. Positions None: they just follow. Mask None: causal from an empty
    cache, or one position that sees all before it.
    """
    end = n + len(parents)
    T, chain = end - start, is_chain(parents)
    if chain and (start == 0 or T == 1):
        return None, None
    visible = np.tri(T, end, k=start, dtype=bool)
    positions = None
    if not chain:
        if ancestors is None:
            ancestors = ancestor_mask(parents)
        first = max(0, start - n)  # the nodes before it are in the cache already
        visible[n + first - start :, n:] = ancestors[first:]
        depths = ancestors.sum(axis=1) - 1
        positions = np.concatenate((np.arange(n), n + depths))[start:]
        positions = torch.from_numpy(positions).to(device)
    # Rows begin at multiples of 16 bytes: GPU kernels would copy a mask with others in every layer.
    mask = torch.full((T, -(-end // 8) * 8), -torch.inf, dtype=dtype, device=device)[:, :end]
    return positions, mask.masked_fill_(torch.from_numpy(visible).to(device), 0.0)


@dataclass(frozen=True)
class KConfig:
    """A shape known beforehand: ``widths[d]`` children for every node of level d - 1.

    (1, 1, 1) is a chain of three, (4, 1, 1) a fork of four chains (arXiv 2401.06706, section 3).
    Every node that is drafted is sent to the target. Levels end where the product of their
    confidences falls below the tree's ``min_prob``.

    >>> KConfig((2, 1)).parents, KConfig((4, 2, 2, 1)).size
    ([-1, -1, 0, 1], 44)
    """

    widths: tuple[int, ...]

    fixed = True

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def size(self) -> int:
        """Nodes sent to the target at most."""
        return sum(accumulate(self.widths, mul))

    @property
    def max_children(self) -> int:
        return max(self.widths, default=1)

    @property
    def max_nodes(self) -> int:
        """Nodes that are in a KV cache at once, at most."""
        return self.size

    @cached_property
    def parents(self) -> list[int]:
        """Of the whole tree, level by level: a tree that ends early has the first of these."""
        parents, above = [], [CONTEXT]
        for width in self.widths:
            first = len(parents)
            parents += [node for node in above for _ in range(width)]
            above = range(first, len(parents))
        return parents

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Made once, and sliced for every pass ("dynamic sliced mask", arXiv 2409.10644)."""
        return ancestor_mask(self.parents)

    def children(self, tree) -> int:
        """How many children each node of the frontier gets."""
        return self.widths[tree.level]

    def frontier(self, tree) -> list[int]:
        """The nodes to expand next."""
        if tree.level == tree.max_levels or tree.likelihood < tree.min_prob:
            return []
        return [node for node, depth in enumerate(tree.depths) if depth == tree.level - 1]

    def best(self, tree) -> list[int]:
        """The nodes to send to the target."""
        return list(range(len(tree.tokens)))


@dataclass(frozen=True)
class Dynamic:
    """A tree that grows where the draft is confident (S2D's draft tree, arXiv 2407.01955).

    Each of ``depth`` levels expands the most probable ``top_k`` nodes that can still be among the
    ``size`` most probable ones of all, and gives each its ``top_k`` best children. These ``size``
    are sent to the target, but for paths less probable than the tree's ``min_prob``.
    """

    top_k: int
    depth: int
    size: int

    fixed = False

    @property
    def max_children(self) -> int:
        return self.top_k

    @property
    def max_nodes(self) -> int:
        return max(self.size, self.top_k * self.depth)

    def children(self, tree):
        return self.top_k

    def frontier(self, tree):
        return self.waiting(tree)[: self.top_k] if tree.level < tree.max_levels else []

    def waiting(self, tree) -> list[int]:
        """The nodes that may be expanded, the most probable first.

        A child is no more probable than its parent: nothing below the other nodes can be sent.
        """
        expanded = set(tree.expanded)
        return [
            node
            for node in self.best(tree)
            if node not in expanded and tree.depths[node] + 1 < tree.max_levels
        ]

    def best(self, tree):
        """As KConfig's, the most probable first: parents come before their children."""
        ranked = sorted(range(len(tree.tokens)), key=tree.probs.__getitem__, reverse=True)
        return ranked[: self.size]


class BestFirst(Dynamic):
    """As Dynamic, but a level expands one node: for exit 0, whose predictions cost next to nothing.

    Until the tree is full, that finds the ``size`` most probable nodes there are.
    """

    def frontier(self, tree):
        return self.waiting(tree)[:1]


class Tree:
    """The tree of a step: drafted level by level, then sent to the target.

    A node keeps the number it was proposed with. In the KV caches of the draft nodes lie in the
    order in which they were expanded, and the target sees those that are sent: ``parents_among``
    numbers parents anew for either. With top_k = 2, the context expanded first, then 0 and 1, then
    2 and 4 (whose children are not shown):

        context ─┬─ 0 ─┬─ 2 ─ ...     node            0   1   2   3   4   5
                 │     └─ 3           parent         -1  -1   0   0   1   1
                 └─ 1 ─┬─ 4 ─ ...     expanded       0, 1, 2, 4
                       └─ 5           their parents among these: -1, -1, 0, 1

    context: the tokens before the tree
    max_levels: of the tree, where the shape allows more
    min_prob: paths that are less probable are not followed, see the shapes
    tokens, parents, depths, probs, exits: a list each, by node. A depth counts from 0; a
        probability is that of the path to the node; an exit is the draft layer that proposed it.
    frontier: the nodes to expand next, at first the context
    expanded: the nodes that the draft ran or will run next, in the order of their slots
    likelihood: the product of the confidences of the levels
    q: where children were drawn, the distributions (R, V) of each level
    """

    def __init__(self, context, shape, max_levels, min_prob=0.0):
        self.context, self.shape, self.min_prob = context, shape, min_prob
        self.max_levels = min(max_levels, shape.depth)
        self.tokens, self.parents, self.depths, self.probs, self.exits = [], [], [], [], []
        self.level, self.likelihood = 0, 1.0
        self.frontier = [CONTEXT] if self.max_levels > 0 else []
        self.expanded, self.sent, self.q = [], [], []

    @property
    def end(self) -> int:
        """Positions up to the last expanded node."""
        return len(self.context) + len(self.expanded)

    def depth(self, node) -> int:
        """0 for the children of the context, whose own is -1."""
        return -1 if node == CONTEXT else self.depths[node]

    def add_level(self, tokens, probs, exit, confidence=1.0):
        """Give each node of the frontier children: ``tokens`` and ``probs``, a list per node."""
        for parent, own_tokens, own_probs in zip(self.frontier, tokens, probs):
            above = 1.0 if parent == CONTEXT else self.probs[parent]
            for token, prob in zip(own_tokens, own_probs):
                path_prob = above * prob
                if self.shape.fixed or path_prob > 0.0 and path_prob >= self.min_prob:
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self.depths.append(self.depth(parent) + 1)
                    self.probs.append(path_prob)
                    self.exits.append(exit)
        self.level += 1
        self.likelihood *= confidence
        self.frontier = self.shape.frontier(self)
        self.expanded += self.frontier

    def send(self, nodes_to_send=None):
        """Choose the nodes that the target checks: ``sent``, level by level.

        ``nodes_to_send``: how many of the best, by their probabilities (extras/node_count.py).
        """
        best = self.shape.best(self)
        if nodes_to_send is not None:
            best = best[: nodes_to_send([self.probs[node] for node in best])]
        self.sent = sorted(best, key=lambda node: (self.depths[node], node))

    def tokens_of(self, nodes) -> list[int]:
        return [self.tokens[node] for node in nodes]

    def parents_among(self, nodes) -> list[int]:
        """The parents of ``nodes`` by their place among these; CONTEXT stays CONTEXT."""
        place = {CONTEXT: CONTEXT} | {node: i for i, node in enumerate(nodes)}
        return [place[self.parents[node]] for node in nodes]

    def ancestors(self, nodes):
        """The ``ancestor_mask`` of ``nodes`` where it is known: a slice of a fixed shape's."""
        return self.shape.ancestors[: len(nodes), : len(nodes)] if self.shape.fixed else None

    def path(self, node) -> list[int]:
        """The tokens from the first level down to ``node``."""
        path = []
        while node != CONTEXT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


def parse_tree(text: str) -> tuple[int, ...] | Dynamic:
    """A shape as it is written on a command line; ValueError where it is none.

    >>> parse_tree("4,2,2,1"), parse_tree("6x4x60")
    ((4, 2, 2, 1), Dynamic(top_k=6, depth=4, size=60))
    """
    separator = "x" if "x" in text else ","
    try:
        numbers = tuple(int(number) for number in text.split(separator))
    except ValueError:
        numbers = ()
    if separator == "x" and len(numbers) == 3:
        return Dynamic(*numbers)
    if separator == "," and numbers:
        return numbers
    raise ValueError(
        f"a tree is written 4,2,2,1 (children per level) or 6x4x60 (top-k x depth x size), "
        f"not {text!r}"
    )
