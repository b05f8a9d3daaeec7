"""The KV cache: the keys and values that a range of layers has computed for a text."""

import torch
from torch import Tensor

from .devices import to_device


class KVCache:
    """Keys and values of a range of layers. The first ``length`` entries are filled.

    The memory for all ``capacity`` entries is reserved once. An entry is forgotten by lowering
    ``length``. The accepted nodes of a tree are moved next to the context.
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
        # The heads of an entry lie together, so that new entries are written in one piece. With
        # ``empty`` and not ``zeros``, a CPU takes memory only when something is written to it.
        shape = (layer_count, capacity, heads, head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        # The same memory as attention wants it: one (1, heads, capacity, head_dim) for each layer.
        self.keys_by_layer = list(self.keys.transpose(1, 2).unsqueeze(1))
        self.values_by_layer = list(self.values.transpose(1, 2).unsqueeze(1))
        self.length = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` (1, G, T, D) after the filled entries; returns all S+T of each.

        ``layer`` counts from the first layer of the cache. When every layer has stored its keys and
        values, ``Llama.run_layers`` counts the new entries as filled.
        """
        T = k.shape[2]
        end = self.length + T
        keys = self.keys_by_layer[layer]
        values = self.values_by_layer[layer]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def keep(self, n: int, entries: list[int]) -> None:
        """Keep the first ``n`` entries and, of the later ones, ``entries``.

        The later ones move up to n, n + 1 and so on: ``keep(5, [6, 8])`` leaves seven entries. An
        exit that lags behind has filled fewer than ``n``: its ``entries`` are empty, and nothing
        changes.
        """
        self.length = min(self.length, n + len(entries))
        move_up(self.keys, n, entries)
        move_up(self.values, n, entries)


def move_up(rows: Tensor, n: int, entries: list[int]) -> None:
    """In ``rows`` (L, capacity, ...), move the rising ``entries`` to n, n + 1 and so on."""
    end = n + len(entries)
    if entries != list(range(n, end)):  # an accepted part of a chain is in its place already
        rows[:, n:end] = rows[:, to_device(entries, rows.device)]
