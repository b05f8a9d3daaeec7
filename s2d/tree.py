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
    up = (parents[:, None] == torch.arange(len(parents), device=parents.device)).float()  # (N, N), the A above
    return torch.linalg.solve_triangular(identity - up, identity, upper=False, unitriangular=True).bool()


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
    def ancestors(self):
        """(N, N) bool, see ``ancestor_mask``."""
        return ancestor_mask(self.parents)

    @cached_property
    def depths(self):
        """(N,): 0 for the nodes that follow the context directly. Position id = context length + depth."""
        return self.ancestors.sum(dim=-1) - 1

    def paths(self):
        """Root-to-leaf paths (leaves, deepest + 1) as node numbers, filled up with -1."""
        nodes = torch.arange(len(self), device=self.parents.device)
        leaves = nodes[~torch.isin(nodes, self.parents)]
        on_path = self.ancestors[leaves]  # (leaves, N)
        in_order = torch.where(on_path, nodes, len(self)).sort(dim=-1).values[:, : on_path.sum(dim=-1).max()]
        return in_order.where(in_order < len(self), -1)

    def pretty(self, decode=str):
        """The tree and its mask as text, one node a line; ``decode`` turns a token id into what is shown."""
        lines = []
        for node, (token, parent, depth, row) in enumerate(
            zip(self.tokens.tolist(), self.parents.tolist(), self.depths.tolist(), self.ancestors.tolist())
        ):
            sees = " ".join("x" if seen else "." for seen in row)
            lines.append(f"{node:>3} {parent:>3}  {sees}  {'  ' * depth}{decode(token)}")
        return "\n".join(lines)


class TreeAttention:
    """Position ids and attention masks of a tree behind a context, as slices of one table.

    A context is a chain, so context and tree together are one tree of ``capacity`` + N nodes. Its table is made once
    for the largest N. A context of n tokens takes the last n rows and columns of the chain's part, and whoever has
    seen some nodes already, or stops at fewer, takes fewer rows: all slices, nothing is built in the decoding loop
    ("dynamic sliced topology-aware mask", arXiv 2409.10644). Only a tree that chooses its parents while it
    grows writes its own corner anew, by ``set_tree``.
    """

    def __init__(self, capacity, max_nodes, device, dtype):
        size = capacity + max_nodes
        self.capacity = capacity
        self.positions = torch.arange(size, device=device)
        self.mask = torch.full((size, size), -torch.inf, device=device, dtype=dtype).triu(diagonal=1)

    def set_tree(self, ancestors):
        """Let the nodes behind the context look at each other as ``ancestors`` (N, N) says."""
        first, end = self.capacity, self.capacity + len(ancestors)
        self.positions[first:end] = first - 1 + ancestors.sum(dim=-1)
        self.mask[first:end, first:end] = torch.where(ancestors, 0.0, -torch.inf)

    def rows(self, n, start, end):
        """For places start..end-1 of a context of n tokens and its tree: position ids (T,) and mask (T, end).

        The mask is 0 where a place may look and -inf elsewhere, or None where one place sees all before it.
        """
        shift = self.capacity - n
        positions = self.positions[shift + start : shift + end] - shift
        if start + 1 == end <= n + 1:
            return positions, None
        return positions, self.mask[shift + start : shift + end, shift : shift + end]


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
