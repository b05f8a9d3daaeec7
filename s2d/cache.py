"""The KV cache: keys and values of a run of layers, allocated in pieces."""

import torch
from torch import Tensor

from .devices import to_device

PIECE = 1024  # entries: memory for as many, or for all there may be, is allocated at first


class KVCache:
    """Keys and values of a run of layers; the first ``length`` entries are filled.

    Rejected tokens are forgotten by lowering ``length``, and the accepted nodes of a tree move next
    to the context. Nothing is concatenated. Many texts end long before they are as long as they may
    be, so at first there is memory for a part of the entries, and more when it is needed.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        """``shape``: layers, 1, the most entries that there may be, key/value heads, head size."""
        layers, one, self.capacity, heads, head_dim = shape
        # (layers, 1, G, size, D), but in memory the heads of an entry lie together, so that new
        # ones are written in one piece.
        empty = torch.zeros((layers, one, 0, heads, head_dim), device=device, dtype=dtype)
        self.keys = empty.transpose(2, 3)
        self.values = empty.transpose(2, 3)
        self.layers: list[tuple[Tensor, Tensor]] = []  # (1, G, size, D) each
        self.length = 0

    def reserve(self, count: int) -> None:
        """See to it that there is memory for ``count`` entries."""
        if count > self.keys.shape[3]:
            self.move(next_size(count, self.capacity))

    def move(self, size: int) -> None:
        """Move the filled entries to new memory, for ``size`` of them."""
        self.layers = []  # so that the old keys are freed before the new values are made
        filled = slice(0, self.length)
        self.keys = enlarge(self.keys[:, :, :, filled].transpose(2, 3), 2, size).transpose(2, 3)
        self.values = enlarge(self.values[:, :, :, filled].transpose(2, 3), 2, size).transpose(2, 3)
        self.layers = list(zip(self.keys.unbind(), self.values.unbind()))

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` (1, G, T, D) after the filled entries; returns all S+T of each.

        ``layer`` counts from the first layer of the cache. Once every layer has stored its keys and
        values, ``advance``.
        """
        T = k.shape[2]
        end = self.length + T
        self.reserve(end)
        keys, values = self.layers[layer]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, count: int) -> None:
        """Count the new positions, once every layer has stored theirs."""
        self.length += count

    def keep(self, n: int, offsets: list[int]) -> None:
        """Roll back to the first ``n`` entries and those at n + i for i in ``offsets``.

        The latter move to the entries from ``n`` on. If fewer than ``n`` are filled, as in an exit
        that lags behind, ``offsets`` is empty and nothing changes.
        """
        self.length = min(self.length, n + len(offsets))
        move_up(self.keys, n, offsets)
        move_up(self.values, n, offsets)


def next_size(needed: int, capacity: int) -> int:
    """For how many entries to allocate memory if ``needed`` have to be held.

    Twice as many, so that each entry is copied about once on average while a text grows; but never
    more than the ``capacity``, the most that there will be.
    """
    return min(capacity, max(PIECE, 2 * needed))


def enlarge(rows: Tensor, dim: int, size: int) -> Tensor:
    """A copy of ``rows`` that has ``size`` of them along ``dim``; the new ones are 0."""
    shape = list(rows.shape)
    shape[dim] = size
    larger = rows.new_zeros(shape)
    larger.narrow(dim, 0, rows.shape[dim]).copy_(rows)
    return larger


def move_up(rows: Tensor, n: int, offsets: list[int]) -> None:
    """In rows (..., capacity, D), move those at n + i for i in ``offsets`` to n, n + 1, ...

    The ``offsets`` increase.
    """
    if offsets != list(range(len(offsets))):  # the accepted part of a chain is in its place already
        accepted = to_device([n + i for i in offsets], rows.device)
        rows[..., n : n + len(offsets), :] = rows[..., accepted, :]
