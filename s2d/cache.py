"""The KV cache: keys and values of a run of layers, allocated once."""

import torch
from torch import Tensor

from .devices import to_device


class KVCache:
    """Keys and values of a run of layers; of ``capacity`` entries the first ``length`` are filled.

    Rejected tokens are forgotten by lowering ``length``, and the accepted nodes of a tree move next
    to the context. Nothing is ever concatenated.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        """``shape``: layers, 1, capacity, key/value heads, head size."""
        # The heads of an entry lie together in memory, so new ones are written in one piece.
        self.keys = torch.zeros(shape, device=device, dtype=dtype).transpose(2, 3)
        self.values = torch.zeros(shape, device=device, dtype=dtype).transpose(2, 3)
        self.layers = list(zip(self.keys.unbind(), self.values.unbind()))  # (1, G, capacity, D)
        self.length = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` (1, G, T, D) after the filled entries; returns all S+T of each.

        ``layer`` counts from the first layer of the cache. Once every layer has stored its keys and
        values, ``advance``.
        """
        T = k.shape[2]
        end = self.length + T
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


def move_up(rows: Tensor, n: int, offsets: list[int]) -> None:
    """In rows (..., capacity, D), move those at n + i for i in ``offsets`` to n, n + 1, ...

    The ``offsets`` increase.
    """
    if offsets != list(range(len(offsets))):  # the accepted part of a chain is in its place already
        accepted = to_device([n + i for i in offsets], rows.device)
        rows[..., n : n + len(offsets), :] = rows[..., accepted, :]
