"""The mask builder: which position attends to which when a model reads a tree after its context."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .devices import to_device

CONTEXT = -1  # the parent of the nodes of the first level


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


def positions_and_mask(
    start: int,
    n: int,
    parents: list[int],
    device: torch.device,
    dtype: torch.dtype,
    ancestors: Callable[[list[int]], np.ndarray] = ancestor_mask,
) -> tuple[Tensor | None, Tensor | None]:
    """What a model needs to read the rest of a context and the nodes of a tree after it.

    Args:
        start: how many positions, of context and tree, the model has read; they are in its cache.
        n: the length of the context, or of the part of it that is read now.
        parents: of the N nodes, or slots, after it: numbers from 0 to N-1, or CONTEXT.
        device, dtype: of the model.
        ancestors: makes the ancestor mask (N, N) of ``parents``.

    Returns position ids (T,) and a mask (T, start+T) for the T = n + N - start positions that the
    model has not read. Either may be None, for the default of ``run_layers``. With the first three
    nodes of ``ancestor_mask``'s tree after the context a b c d e, if a b c d has been read:

                a b c d   e 0 1 2
          e     x x x x   x . . .      position 4
          0     x x x x   x x . .               5
          1     x x x x   x . x .               5
          2     x x x x   x x . x               6

    If node 0 has been read as well, the rows of e and 0 are missing.
    """
    N = len(parents)
    T = n + N - start
    chain = is_chain(parents)
    if chain and (start == 0 or T == 1):
        return None, None  # plain causal attention, or one row that attends to everything
    # Causal: row i attends to columns 0..start+i. That is right for the context, and for a chain.
    visible = np.tri(T, n + N, k=start, dtype=bool)
    positions = None
    if not chain:
        # The row of a node attends to the whole context, and to the node and its ancestors.
        nodes = np.arange(max(0, start - n), N)  # those that were not read
        of_nodes = ancestors(parents)[nodes]  # (unread, N)
        visible[T - len(nodes) :, n:] = of_nodes
        # The first level is at position n, and each other node one after its parent.
        positions = np.arange(start, start + T)
        positions[T - len(nodes) :] = n - 1 + of_nodes.sum(axis=1)
        positions = to_device(positions, device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return positions, mask.masked_fill_(to_device(~visible, device), -torch.inf)
