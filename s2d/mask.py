"""The mask builder: which position attends to which when a model reads a tree after its context."""

import numpy as np
import torch
from torch import Tensor

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
    ancestors: np.ndarray | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """What a model needs to read the rest of a context and the nodes of a tree after it.

    Args:
        start: how many positions, of context and tree, the model has read; they are in its cache.
        n: the length of the context.
        parents: of the N nodes after it, by their place among them.
        device, dtype: of the model.
        ancestors: the ancestor mask of a tree that begins with these nodes; if None, it is made.

    Returns position ids (T,) and a mask (T, start+T) for the T = n + N - start positions that the
    model has not read. Either may be None, for the default of ``run_layers``. With the first three
    nodes of ``ancestor_mask``'s tree after the context a b c d e, if a b c d has been read:

                a b c d   e 0 1 2
          e     x x x x   x . . .      position 4
          0     x x x x   x x . .               5
          1     x x x x   x . x .               5
          2     x x x x   x x . x               6
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
        if ancestors is None:
            ancestors = ancestor_mask(parents)
        context_positions = np.arange(start, max(start, n))
        node_rows = ancestors[max(0, start - n) : N, :N]  # of the nodes that were not read
        visible[len(context_positions) :, n:] = node_rows
        # The first level is at position n, and each other node one after its parent.
        node_positions = n - 1 + node_rows.sum(axis=1)
        positions = np.concatenate((context_positions, node_positions))
        positions = torch.from_numpy(positions).to(device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return positions, mask.masked_fill_(torch.from_numpy(~visible).to(device), -torch.inf)
