"""The mask: which tokens a token attends to when a model reads a tree."""

import numpy as np
import torch
from torch import Tensor

from .devices import to_device

# How many tokens of the context one pass with a mask may read: the mask has a row for each.
MAX_UNREAD = 256
ROOT_ALONE = np.ones((1, 1), dtype=bool)  # the ancestor matrix of a tree without drafted nodes
ROOT_ALONE.flags.writeable = False


def add_nodes(ancestors: np.ndarray, parents: list[int]) -> np.ndarray:
    """The ancestor matrix of a tree that gets one more node below each of ``parents``.

    Row i says which nodes node i attends to: its ancestors and itself. The matrix grows with the
    tree, level by level. The mask of every pass is made of a slice of it ("dynamic sliced mask",
    arXiv 2409.10644).

        0 ─┬─ 1 ─┬─ 3 ─── 6        node  parent   attends to
           │     └─ 4                0     -1     0 . . . . . . .
           └─ 2 ─── 5 ─── 7          1      0     0 1 . . . . . .
                                     2      0     0 . 2 . . . . .
                                     3      1     0 1 . 3 . . . .
                                     4      1     0 1 . . 4 . . .
                                     5      2     0 . 2 . . 5 . .
                                     6      3     0 1 . 3 . . 6 .
                                     7      5     0 . 2 . . 5 . 7
    """
    old = len(ancestors)
    size = old + len(parents)
    larger = np.zeros((size, size), dtype=bool)
    larger[:old, :old] = ancestors
    larger[old:, :old] = ancestors[parents]  # a node attends to whatever its parent attends to,
    larger[old:, old:] = np.eye(len(parents), dtype=bool)  # and to itself
    larger.flags.writeable = False
    return larger


def positions_and_mask(
    read: int, context_length: int, ancestors: np.ndarray, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """What a model needs to read the rest of a context and some nodes of a tree after it.

    Args:
        read: how many entries the model's cache holds. It holds the context first, then nodes.
        context_length: the number of tokens in the context. The last of them is node 0.
        ancestors: the ancestor matrix (N+1, N+1) of node 0 and of N nodes after it, read or not.
        device, dtype: of the model.

    Returns the positions (T,) and the mask (T, read+T) of the T = context_length + N - read entries
    that are not read yet. The mask is None where PyTorch's own causal attention is right. In this
    example the context is a b c d e, so e is node 0. The nodes 1, 2 and 3 of the tree above follow,
    and the model has read a b c d.

                a b c d   e 1 2 3
          e     x x x x   x . . .      position 4
          1     x x x x   x x . .               5
          2     x x x x   x . x .               5
          3     x x x x   x x . x               6

    If node 1 has been read as well, the rows of e and 1 are missing.
    """
    root = context_length - 1  # the entry of node 0
    T = root + len(ancestors) - read
    is_chain = ancestors[-1].all()  # the last node of a chain attends to all the others
    if is_chain and (read == 0 or T == 1):
        return to_device(np.arange(read, read + T, dtype=np.float32), device), None
    lag = max(0, root - read)  # so many tokens of the context before the root are read now
    visible = np.tri(T, read + T, k=read, dtype=bool)  # row i, entry read + i, sees all before
    # But of the nodes, a node sees only its ancestors. Nodes that have been read have no row.
    visible[lag:, root:] = ancestors[-(T - lag) :]
    positions = visible.sum(axis=1, dtype=np.float32) - 1  # at position i, i + 1 are visible
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    mask.masked_fill_(to_device(~visible, device), -torch.inf)
    return to_device(positions, device), mask
