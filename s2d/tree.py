"""Token trees: many continuations of one context, checked by a model in a single pass.

Knows nothing about models. A tree is two facts a node, its token and its parent; depths, masks and
position ids follow from them. Two kinds of tree are drafted: ``KConfig``, a shape known beforehand,
and ``Dynamic``, which grows where the draft is confident. In a chain each node has one child.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

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


def is_chain(parents):
    """Whether each node follows the one before it, by its parents (N,)."""
    return parents.tolist() == list(range(-1, len(parents) - 1))


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

    @property
    def chain(self):
        """Whether each node follows the one before it."""
        return is_chain(self.parents)

    @property
    def ancestors(self):
        """(N, N) bool, see ``ancestor_mask``."""
        return ancestor_mask(self.parents)

    @property
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

    Only a tree that chooses its parents while it grows writes its own corner anew. A chain, which
    just follows the context, needs no table.
    """

    def __init__(self, window, max_nodes, device, dtype):
        self.window, self.size = window, window + max_nodes
        self.chain = True
        self.depths = torch.arange(max_nodes, device=device)
        self.table = None
        self.dtype = dtype

    def set_tree(self, parents):
        """Let the nodes attend to each other as a tree with these ``parents`` (N,) does."""
        first, end = self.window, self.window + len(parents)
        self.chain = is_chain(parents)
        if self.chain:
            return
        if self.table is None:
            like = dict(device=self.depths.device, dtype=self.dtype)
            self.table = torch.full((self.size, self.size), -torch.inf, **like).triu(1)
        ancestors = ancestor_mask(parents)
        self.depths[: len(parents)] = ancestors.sum(dim=-1) - 1
        self.table[first:end, first:end] = torch.where(ancestors, 0.0, -torch.inf)

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
    2401.06706, section 3). ``max_slots``: how many nodes a draft may run through its layers.

    >>> KConfig((2, 1)).parents().tolist(), KConfig((4, 2, 2, 1)).size
    ([-1, -1, 0, 1], 44)
    """

    widths: tuple[int, ...]

    fixed = True
    width = property(lambda self: self.widths[0])  # nodes of the first level
    depth = property(lambda self: len(self.widths))
    size = property(lambda self: sum(accumulate(self.widths, mul)))
    max_slots = size
    max_children = property(lambda self: max(self.widths, default=1))
    numbers = property(lambda self: self.widths)

    def parents(self):
        """(N,) of the whole tree; those of a tree that ends early are a leading slice."""
        levels = [torch.zeros(0, dtype=torch.long)]
        above, count = torch.tensor([-1]), 0
        for width in self.widths:
            levels.append(above.repeat_interleave(width))
            above = torch.arange(count, count + len(levels[-1]))
            count += len(above)
        return torch.cat(levels)


@dataclass(frozen=True)
class Dynamic:
    """A tree that grows where the draft is confident (S2D's "adaptive attention tree").

    In each of ``depth`` rounds at most ``top_k`` nodes get their ``top_k`` likeliest children; the
    most probable ``size`` nodes of all are kept (arXiv 2407.01955; see proposal.py). Exit 0 alone
    asks its table about one node a round, until it has these.
    """

    top_k: int
    depth: int
    size: int

    fixed = False
    width = max_children = property(lambda self: self.top_k)
    max_slots = property(lambda self: self.top_k * self.depth)
    numbers = property(lambda self: (self.top_k, self.depth, self.size))
