"""Token trees: many continuations of one context, checked by a model in a single pass.

A tree is two facts a node, its token and its parent; depths, masks, position ids and paths all follow from them. Two
kinds of tree are drafted: ``KConfig``, a shape known beforehand, and ``Dynamic``, which grows where the draft is
confident. A chain is the shape with one child per node. Knows nothing about models.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


def ancestor_mask(parents):
    """Parents (N,), -1 for the context, each smaller than its child's number -> (N, N) bool: who looks at whom.

    Row i is true at i, at its parent, at its parent's parent, and so on: what node i may attend to besides the context.

        context ─┬─ 0 ─┬─ 2 ─── 4        node  parent   looks at
                 │     └─ 3                0     -1     0 . . . .
                 └─ 1                      1     -1     . 1 . . .
                                           2      0     0 . 2 . .
                                           3      0     0 . . 3 .
                                           4      2     0 . 2 . 4

    With A[i, parent of i] = 1 this is I + A + A² + ... = (I - A)⁻¹, found by one triangular solve. Every entry counts
    the ways up from i to j, of which a tree has one or none, so the solution is exact.
    """
    identity = torch.eye(len(parents), device=parents.device)
    up = (
        parents[:, None] == torch.arange(len(parents), device=parents.device)
    ).float()  # (N, N), the A above
    return torch.linalg.solve_triangular(
        identity - up, identity, upper=False, unitriangular=True
    ).bool()


@dataclass(frozen=True)
class TokenTree:
    """N drafted tokens (N,) and their parents (N,), each int64; parent -1 is the context.

    Nodes are numbered level by level, so every leading slice ``tree[:n]`` is a tree too.
    """

    tokens: torch.Tensor
    parents: torch.Tensor

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, leading):
        return TokenTree(self.tokens[leading], self.parents[leading])

    @cached_property
    def chain(self):
        """Whether each node goes on where the one before it ends."""
        return self.parents.tolist() == list(range(-1, len(self) - 1))

    @cached_property
    def ancestors(self):
        """(N, N) bool, see ``ancestor_mask``."""
        return ancestor_mask(self.parents)

    @cached_property
    def depths(self):
        """(N,): 0 for the nodes that follow the context directly. Position id = context length + depth."""
        return self.ancestors.sum(dim=-1) - 1


class TreeAttention:
    """Position ids and attention masks of a tree behind a context.

    Whoever is new in a step sees all of the context but, at most, its newest tokens, those of a ``window`` that are new
    as well; so a mask is about these and the tree. As a context is a chain, both together are one tree of ``window`` + N
    nodes. Its table is made once for the largest N, and every step takes a slice ("dynamic sliced topology-aware
    mask", arXiv 2409.10644). With a window of 2 and the first three nodes of the tree that ``ancestor_mask`` shows, behind
    the context a b c d e, for a model that has seen a b c d:

        table     d e 0 1 2       slice     e 0 1 2       the mask of e 0 1 2, with all that
          d       x . . . .         e       x . . .       came before:    a b c d  e 0 1 2
          e       x x . . .         0       x x . .                   e   x x x x  x . . .
          0       x x x . .         1       x . x .                   0   x x x x  x x . .
          1       x x . x .         2       x x . x                   1   x x x x  x . x .
          2       x x x . x                                           2   x x x x  x x . x

    Only a tree that chooses its parents while it grows writes its own corner anew, by ``set_tree``.
    """

    def __init__(self, window, max_nodes, device, dtype):
        size = window + max_nodes
        self.window, self.chain = (
            window,
            False,
        )  # chain: the nodes just go on where the context ends
        self.depths = torch.zeros(max_nodes, dtype=torch.long, device=device)
        self.table = torch.full((size, size), -torch.inf, device=device, dtype=dtype).triu(
            diagonal=1
        )

    def set_tree(self, ancestors, chain=False):
        """Let the nodes behind the context look at each other as ``ancestors`` (N, N) says, which may be a ``chain``."""
        first, end = self.window, self.window + len(ancestors)
        self.depths[: len(ancestors)] = ancestors.sum(dim=-1) - 1
        self.table[first:end, first:end] = torch.where(ancestors, 0.0, -torch.inf)
        self.chain = chain

    def span(self, n, start, end):
        """What ``run_layers`` asks for places start..end-1 of a context of n tokens and the tree behind it.

        Position ids (T,), and the mask (R, C) for the last R places and columns. Its rows are those of the nodes and,
        unless ``start`` is 0, of the context, at most ``window``: a prompt needs none. Both None where all is a chain.
        """
        if end <= n or self.chain:
            return None, None
        context = torch.arange(min(start, n), n, device=self.depths.device)
        positions = torch.cat((context, n + self.depths[max(0, start - n) : end - n]))
        first, shift = (
            start or n,
            self.window - n,
        )  # the first place with a row; from places to the table's rows
        if first == n == end - 1:
            return positions, None
        return positions, self.table[
            first + shift : end + shift, min(first, n) + shift : end + shift
        ]


@dataclass(frozen=True)
class KConfig:
    """A shape known beforehand: ``widths[d]`` children for every node of level d - 1 (arXiv 2401.06706, section 3).

    (1, 1, 1) is a chain of three, (4, 2, 2, 1) a bush, (4, 1, 1) a fork of four chains.
    """

    widths: tuple[int, ...]

    @property
    def width(self):
        """Nodes of the first level."""
        return self.widths[0]

    @property
    def depth(self):
        return len(self.widths)

    @cached_property
    def level_sizes(self):
        """Nodes of each level."""
        sizes = [1]
        for width in self.widths:
            sizes.append(sizes[-1] * width)
        return sizes[1:]

    @property
    def size(self):
        return sum(self.level_sizes)

    @property
    def chain(self):
        """Whether no node has more than one child."""
        return max(self.widths, default=1) == 1

    def parents(self):
        """(N,) of the whole tree; those of an earlier end are a leading slice."""
        levels, above, count = [torch.zeros(0, dtype=torch.long)], torch.tensor([-1]), 0
        for width, size in zip(self.widths, self.level_sizes):
            levels.append(above.repeat_interleave(width))
            above = torch.arange(count, count + size)
            count += size
        return torch.cat(levels)


@dataclass(frozen=True)
class Dynamic:
    """A tree that grows where the draft is confident (S2D, arXiv 2407.01955, "adaptive attention tree").

    Every level expands the ``top_k`` nodes with the highest cumulative log-probability, each by its ``top_k`` best
    children, ``depth`` levels deep; of all candidates the best ``size`` are kept.
    """

    top_k: int
    depth: int
    size: int

    @property
    def width(self):
        """Nodes of the first level."""
        return self.top_k
