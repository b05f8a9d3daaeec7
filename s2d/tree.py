"""Token trees: many continuations of one context, checked by a model in a single pass.

Knows nothing about models. A tree is two facts a node, its token and its parent; depths, masks and
position ids follow from them. Two kinds of tree are drafted: ``KConfig``, a shape known beforehand,
and ``Dynamic``, which grows where the draft is confident. In a chain each node has one child.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F

CONTEXT = -1  # stands for a node's number where the context itself is meant


def ancestor_mask(parents):
    """Parents (N,), each before its children -> (N, N) bool: which node attends to which.

    Node i attends to itself, to its parent, to its parent's parent, and so on up to the context.

        context ─┬─ 0 ─┬─ 2 ─── 4        node  parent   attends to
                 │     └─ 3                0     -1     0 . . . .
                 └─ 1                      1     -1     . 1 . . .
                                           2      0     0 . 2 . .
                                           3      0     0 . . 3 .
                                           4      2     0 . 2 . 4

    With A[i, parent of i] = 1 the matrix A² is 1 at each grandparent, and so on up. Their sum
    I + A + A² + ... = (I - A)⁻¹ is found by one triangular solve, without a loop over nodes. Every
    entry counts the ways up from i to j. A tree has one or none, so the solution is exact.

    >>> ancestor_mask(torch.tensor([-1, -1, 0])).int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    numbers = torch.arange(len(parents), device=parents.device)
    up = (parents[:, None] == numbers).float()  # (N, N), the A above
    one = torch.eye(len(parents), device=parents.device)
    return torch.linalg.solve_triangular(one - up, one, upper=False, unitriangular=True).bool()


def is_chain(parents):
    """Whether each node follows the one before it, by its parents (N,)."""
    return parents.tolist() == list(range(-1, len(parents) - 1))


@dataclass(frozen=True)
class TokenTree:
    """N drafted tokens (N,) and their parents (N,), each int64; a root's parent is CONTEXT.

    Nodes are numbered level by level, so the first n of them are a tree too.
    """

    tokens: torch.Tensor
    parents: torch.Tensor

    def __len__(self):
        return len(self.tokens)


class TreeAttention:
    """Position ids and attention masks of a tree, by its ``parents`` (N,), behind a context.

    The mask of a tree and of the position before it is made once, and a pass takes a slice of it
    ("dynamic sliced topology-aware mask", arXiv 2409.10644). With the first three nodes of
    ``ancestor_mask``'s tree behind the context a b c d e, for a model that has seen a b c d:

                a b c d   e 0 1 2
          e     x x x x   x . . .      The mask is about e 0 1 2; all before them is seen.
          0     x x x x   x x . .
          1     x x x x   x . x .
          2     x x x x   x x . x

    A chain just follows the context and needs no mask.
    """

    def __init__(self, parents, dtype):
        self.parents, self.chain = parents, is_chain(parents)
        if not self.chain:
            ancestors = ancestor_mask(parents)
            self.depths = ancestors.sum(dim=-1) - 1  # (N,): 0 for the children of the context
            nodes = torch.where(ancestors, 0.0, -torch.inf).to(dtype)  # (N, N)
            self.mask = F.pad(nodes, (1, 0, 1, 0))  # (N+1, N+1)
            self.mask[0, 1:] = -torch.inf

    def span(self, n, start, end):
        """What ``run_layers`` needs for start..end-1 of a context of n positions and its tree.

        Returns position ids (T,) and the mask (R, C); None where ``run_layers`` does without.
        """
        if end <= n or self.chain:
            return None, None
        nodes, size = slice(max(0, start - n), end - n), end - n + 1
        context = torch.arange(min(start, n), n, device=self.depths.device)
        positions = torch.cat((context, n + self.depths[nodes]))
        if end == n + 1 and start in (0, n):  # the one row sees all
            return positions, None
        if start == 0 or start >= n:  # nodes alone, or behind a prompt, which needs no rows
            return positions, self.mask[nodes.start + 1 : size, 1:size]
        if start == n - 1:  # behind one position: the mask as above
            return positions, self.mask[:size, :size]
        # Behind several: a causal mask, with that one in its last corner.
        mask = self.mask.new_full((end - start, end - start), -torch.inf).triu(1)
        mask[n - 1 - start :, n - 1 - start :] = self.mask[:size, :size]
        return positions, mask


@dataclass(frozen=True)
class KConfig:
    """A shape known beforehand: ``widths[d]`` children for every node of level d - 1.

    (1, 1, 1) is a chain of three, (4, 1, 1) a fork of four (arXiv 2401.06706, section 3).
    ``max_slots``: how many nodes a draft may run through its layers.

    >>> KConfig((2, 1)).parents().tolist(), KConfig((4, 2, 2, 1)).size
    ([-1, -1, 0, 1], 44)
    """

    widths: tuple[int, ...]

    fixed = True
    roots = property(lambda self: self.widths[0])
    depth = property(lambda self: len(self.widths))
    size = property(lambda self: sum(accumulate(self.widths, mul)))
    max_slots = size
    max_children = property(lambda self: max(self.widths, default=1))

    def parents(self):
        """(N,) of the whole tree; those of a tree that ends early are a leading slice."""
        parents, above = [], [CONTEXT]
        for width in self.widths:
            first = len(parents)
            parents += [node for node in above for _ in range(width)]
            above = range(first, len(parents))
        return torch.tensor(parents, dtype=torch.long)


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
    roots = max_children = property(lambda self: self.top_k)
    max_slots = property(lambda self: self.top_k * self.depth)  # should every round run

    def parents(self):
        return torch.zeros(0, dtype=torch.long)  # none is known beforehand
