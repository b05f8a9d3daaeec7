"""The KV cache: keys and values of a range of layers, in memory that grows with the text."""

import torch
from torch import Tensor

from .devices import to_device

MIN_SIZE = 1024  # entries for which memory is allocated at first, if there may be so many


class KVCache:
    """Keys and values of a range of layers; the first ``length`` entries are filled.

    Rejected tokens are forgotten by lowering ``length``, and the accepted nodes of a tree move next
    to the context. Nothing is concatenated. Many texts end long before they are as long as they may
    be, so at first there is memory for a part of the entries, and more when it is needed.
    """

    def __init__(
        self,
        layer_count: int,
        capacity: int,
        heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``capacity``: the most entries that there may be; ``heads``: of keys and values."""
        self.capacity = capacity
        self.head_dim = head_dim
        # The heads of an entry lie together, so that new ones are written in one piece.
        self.keys = torch.zeros((layer_count, 0, heads * head_dim), device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.layers: list[tuple[Tensor, Tensor]] = []  # views of these, (1, G, size, D) each
        self.length = 0

    def reserve(self, count: int) -> None:
        """See to it that there is memory for ``count`` entries."""
        if count > self.keys.shape[1]:
            self.move(next_size(count, self.capacity))

    def move(self, size: int) -> None:
        """Move the filled entries to new memory, for ``size`` of them."""
        self.layers = []  # so that the old keys are freed before the new values are made
        self.keys = enlarge(self.keys[:, : self.length], size)
        self.values = enlarge(self.values[:, : self.length], size)
        self.layers = [(self.by_head(k), self.by_head(v)) for k, v in zip(self.keys, self.values)]

    def by_head(self, rows: Tensor) -> Tensor:
        """The memory (size, G·D) of one layer -> a view of it (1, G, size, D)."""
        return rows.view(1, len(rows), -1, self.head_dim).transpose(1, 2)

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

    MIN_SIZE, or twice as many, so that each entry is copied about once on average while a text
    grows; but never more than the ``capacity``, the most that there will be.
    """
    return min(capacity, max(MIN_SIZE, 2 * needed))


def enlarge(rows: Tensor, size: int) -> Tensor:
    """A copy of rows (L, filled, width) with room for ``size`` of them; the new ones are 0."""
    layers, filled, width = rows.shape
    larger = rows.new_zeros((layers, size, width))
    larger[:, :filled] = rows
    return larger


def move_up(rows: Tensor, n: int, offsets: list[int]) -> None:
    """In rows (L, size, width), move those at n + i for i in ``offsets`` to n, n + 1, ...

    The ``offsets`` increase.
    """
    if offsets != list(range(len(offsets))):  # the accepted part of a chain is in its place already
        accepted = to_device([n + i for i in offsets], rows.device)
        rows[:, n : n + len(offsets)] = rows[:, accepted]
