"""The mask builder: which position attends to which when a model reads a tree after its context."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .devices import to_device

CONTEXT = -1  # the parent of the nodes of the first level
# Positions of context that a pass with a mask may read: the mask grows with their square.
MAX_UNREAD = 256


def ancestor_mask(parents: list[int]) -> np.ndarray:
    """Parents (N,), each before its children -> (N, N) bool: which node attends to which.

    A node attends to all that its parent attends to, and to itself.

        context ─┬─ 0 ─┬─ 2 ─── 5        node  parent   attends to
                 │     └─ 3                0     -1     0 . . . . . .
                 └─ 1 ─── 4 ─── 6          1     -1     . 1 . . . . .
                                           2      0     0 . 2 . . . .
                                           3      0     0 . . 3 . . .
                                           4      1     . 1 . . 4 . .
                                           5      2     0 . 2 . . 5 .
                                           6      4     . 1 . . 4 . 6
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
    read: int,
    context_length: int,
    parents: list[int],
    device: torch.device,
    dtype: torch.dtype,
    ancestors: Callable[[list[int]], np.ndarray] = ancestor_mask,
) -> tuple[Tensor | None, Tensor | None]:
    """What a model needs to read the rest of a context and the nodes of a tree after it.

    Args:
        read: how many positions, of context and tree, are in the model's cache.
        context_length: how many tokens of context there are, or are to be read now.
        parents: of the N nodes, or slots, after them: numbers from 0 to N-1, or CONTEXT.
        device, dtype: of the model.
        ancestors: makes the ancestor mask (N, N) of ``parents``.

    Returns position ids (T,) and a mask (T, read+T) for the T = context_length + N - read positions
    that the model has not read. Either may be None, for the default of ``run_layers``. With the
    first three nodes of ``ancestor_mask``'s tree after the context a b c d e, if a b c d has been
    read:

                a b c d   e 0 1 2
          e     x x x x   x . . .      position 4
          0     x x x x   x x . .               5
          1     x x x x   x . x .               5
          2     x x x x   x x . x               6

    If node 0 has been read as well, the rows of e and 0 are missing.
    """
    N = len(parents)
    T = context_length + N - read
    chain = is_chain(parents)
    if chain and (read == 0 or T == 1):
        return None, None  # plain causal attention, or one row that attends to everything
    # Causal: row i attends to columns 0..read+i. That is right for the context, and for a chain.
    visible = np.tri(T, read + T, k=read, dtype=bool)
    positions = None
    if not chain:
        # The row of a node attends to the whole context, and to the node and its ancestors.
        nodes = np.arange(max(0, read - context_length), N)  # those that were not read
        of_nodes = ancestors(parents)[nodes]  # (unread, N)
        visible[T - len(nodes) :, context_length:] = of_nodes
        # The first level is right after the context, and each other node one after its parent.
        positions = np.arange(read, read + T)
        positions[T - len(nodes) :] = context_length - 1 + of_nodes.sum(axis=1)
        positions = to_device(positions, device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return positions, mask.masked_fill_(to_device(~visible, device), -torch.inf)
