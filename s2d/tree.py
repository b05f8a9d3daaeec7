"""Token trees: many continuations of one context, checked by a model in a single pass.

Knows nothing about models. A tree is two facts a node, its token and its parent; depths, masks and
position ids follow from them. Two kinds of tree are drafted: ``KConfig``, a shape known beforehand,
and ``Dynamic``, which grows where the draft is confident. In a chain each node has one child.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


def ancestor_mask(parents):
    """Parents (N,), -1 for the context, before their children -> (N, N) bool: who attends to whom.

    Row i is true at i, at its parent, at its parent's parent, and so on. Node i attends to these
    besides the context.

        context ─┬─ 0 ─┬─ 2 ─── 4        node  parent   attends to
                 │     └─ 3                0     -1     0 . . . .
                 └─ 1                      1     -1     . 1 . . .
                                           2      0     0 . 2 . .
                                           3      0     0 . . 3 .
                                           4      2     0 . 2 . 4

    With A[i, parent of i] = 1 this is I + A + A² + ... = (I - A)⁻¹, found by one triangular solve.
    Every entry counts the ways up from i to j. A tree has one or none, so the solution is exact.

    >>> ancestor_mask(torch.tensor([-1, -1, 0])).int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    numbers = torch.arange(len(parents), device=parents.device)
    up = (parents[:, None] == numbers).float()  # (N, N), the A above
    identity = torch.eye(len(parents), device=parents.device)
    inverse = torch.linalg.solve_triangular(
        identity - up, identity, upper=False, unitriangular=True
    )
    return inverse.bool()


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
    def chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents.tolist() == list(range(-1, len(self) - 1))

    @cached_property
    def ancestors(self):
        """(N, N) bool, see ``ancestor_mask``."""
        return ancestor_mask(self.parents)

    @cached_property
    def depths(self):
        """(N,): 0 for the children of the context. Position id = context length + depth."""
        return self.ancestors.sum(dim=-1) - 1


class TreeAttention:
    """Position ids and attention masks of a tree behind a context.

    What is new in a step attends to all of the context, except that the newest positions of the
    context, the ``window``, are new as well and attend to what is before them. So a mask is about
    the window and the tree. A context is a chain, so both together are one tree of ``window`` + N
    nodes. Its table is made once for the largest N, and every step takes a slice ("dynamic sliced
    topology-aware mask", arXiv 2409.10644). With a window of 2 and the first three nodes of
    ``ancestor_mask``'s tree, behind the context a b c d e, for a model that has seen a b c d:

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
        self.window = window
        self.chain = False  # whether the nodes just follow the context, one after the other
        self.depths = torch.zeros(max_nodes, dtype=torch.long, device=device)
        self.table = torch.full((size, size), -torch.inf, device=device, dtype=dtype).triu(1)

    def set_tree(self, ancestors, chain=False):
        """Let the nodes attend to each other as ``ancestors`` (N, N) says, maybe a ``chain``'s."""
        first, end = self.window, self.window + len(ancestors)
        self.depths[: len(ancestors)] = ancestors.sum(dim=-1) - 1
        self.table[first:end, first:end] = torch.where(ancestors, 0.0, -torch.inf)
        self.chain = chain

    def span(self, n, start, end):
        """What ``run_layers`` needs for start..end-1 of a context of n positions and its tree.

        Returns position ids (T,), and the mask (R, C) for the last R rows and the last C columns.
        The rows are those of the nodes and, unless ``start`` is 0, of the context, at most
        ``window``: a prompt needs none. Both are None where all of it is a chain.
        """
        if end <= n or self.chain:
            return None, None
        context = torch.arange(min(start, n), n, device=self.depths.device)
        positions = torch.cat((context, n + self.depths[max(0, start - n) : end - n]))
        first = start or n  # the first position with a row
        shift = self.window - n  # from positions to rows of the table
        if first == n == end - 1:
            return positions, None
        corner = self.table[first + shift : end + shift, min(first, n) + shift : end + shift]
        return positions, corner


@dataclass(frozen=True)
class KConfig:
    """A shape known beforehand: ``widths[d]`` children for every node of level d - 1.

    (1, 1, 1) is a chain of three, (4, 2, 2, 1) a bush, (4, 1, 1) a fork of four chains (arXiv
    2401.06706, section 3).

    >>> KConfig((2, 1)).parents().tolist(), KConfig((4, 2, 2, 1)).size
    ([-1, -1, 0, 1], 44)
    """

    widths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Nodes of the first level."""
        return self.widths[0]

    @property
    def depth(self) -> int:
        return len(self.widths)

    @cached_property
    def level_sizes(self) -> list[int]:
        """Nodes of each level."""
        sizes = [1]
        for width in self.widths:
            sizes.append(sizes[-1] * width)
        return sizes[1:]

    @property
    def size(self) -> int:
        return sum(self.level_sizes)

    @property
    def max_children(self) -> int:
        return max(self.widths, default=1)

    @property
    def max_slots(self) -> int:
        """How many nodes a draft may run through its layers: all of them."""
        return self.size

    def parents(self):
        """(N,) of the whole tree; those of a tree that ends early are a leading slice."""
        levels = [torch.zeros(0, dtype=torch.long)]
        above, count = torch.tensor([-1]), 0
        for width, size in zip(self.widths, self.level_sizes):
            levels.append(above.repeat_interleave(width))
            above = torch.arange(count, count + size)
            count += size
        return torch.cat(levels)


@dataclass(frozen=True)
class Dynamic:
    """A tree that grows where the draft is confident (S2D's "adaptive attention tree").

    Every level expands the ``top_k`` nodes with the highest cumulative log-probability, each by its
    ``top_k`` best children, ``depth`` levels deep; of all candidates the best ``size`` are kept
    (arXiv 2407.01955).
    """

    top_k: int
    depth: int
    size: int

    @property
    def width(self) -> int:
        """Nodes of the first level."""
        return self.top_k

    @property
    def max_children(self) -> int:
        return self.top_k

    @property
    def max_slots(self) -> int:
        """How many nodes a draft may run through its layers: those it expands."""
        return self.top_k * self.depth
