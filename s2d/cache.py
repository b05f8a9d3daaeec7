"""The KV cache: the keys and values that a range of layers has computed for a text."""

from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from .devices import to_device


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries (B, H, T, D) to keys and values (B, G, S+T, D): (B, H, T, D).

    ``mask`` (T, S+T) is added to the scores. Without a mask, attention is causal if S = 0, and a
    single query (T = 1) attends to everything. G divides H: H/G query heads share a key head.
    """
    causal = mask is None and q.shape[2] > 1
    grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


class NoCache:
    """In the place of a cache, for a text that is read in one pass: nothing is kept."""

    length = 0

    def __init__(self) -> None:
        self.layers = repeat(self)

    def extend(self, T: int) -> None:
        """Nothing is kept of the ``T`` new positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attention(q, k, v, mask)


class LayerCache:
    """A layer's keys and values (1, G, capacity, D): a part of a ``KVCache``, which sets them."""

    keys: Tensor
    values: Tensor
    length = 0  # of the entries, those of the pass that is being made included

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Keep the newest T keys and values (1, G, T, D); attend to all from q (1, H, T, D)."""
        T = k.shape[2]
        self.keys.narrow(2, self.length - T, T).copy_(k)
        self.values.narrow(2, self.length - T, T).copy_(v)
        keys = self.keys.narrow(2, 0, self.length)
        values = self.values.narrow(2, 0, self.length)
        return attention(q, keys, values, mask)


class KVCache:
    """Keys and values of a range of layers. The first ``length`` entries are filled.

    An entry is forgotten by lowering ``length``. The accepted nodes of a tree are moved next to the
    context. The memory grows when it must.
    """

    def __init__(
        self, layer_count: int, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.length = 0
        # The heads of an entry lie together, so that new entries are written in one piece.
        self.keys = torch.empty((layer_count, 0, heads, head_dim), device=device, dtype=dtype)
        self.values = self.keys
        self.layers = [LayerCache() for _ in range(layer_count)]

    def extend(self, T: int) -> None:
        """Count ``T`` new entries as filled: each layer is about to fill its own."""
        end = self.length + T
        if end > self.keys.shape[1]:
            self.keys = enlarge(self.keys, end, self.length)
            self.values = enlarge(self.values, end, self.length)
            for layer, keys, values in zip(self.layers, self.keys, self.values):
                layer.keys = keys.transpose(0, 1).unsqueeze(0)  # the same memory
                layer.values = values.transpose(0, 1).unsqueeze(0)
        self.length = end
        for layer in self.layers:
            layer.length = end

    def keep(self, n: int, entries: list[int]) -> None:
        """Keep the first ``n`` entries and, of the later ones, ``entries``.

        The later ones move up to n, n + 1 and so on: ``keep(5, [6, 8])`` leaves seven entries. An
        exit that lags behind has filled fewer than ``n``: its ``entries`` are empty, and nothing
        changes.
        """
        self.length = min(self.length, n + len(entries))
        move_up(self.keys, n, entries)
        move_up(self.values, n, entries)


def enlarge(rows: Tensor, needed: int, filled: int) -> Tensor:
    """``rows`` (L, S, ...) with memory for ``needed`` rows and more; ``filled`` ones are copied.

    A quarter more is reserved, so that a growing text is copied a few times and not at each step.
    With ``empty`` and not ``zeros``, a CPU takes memory only when something is written to it.
    """
    larger = rows.new_empty((len(rows), needed + needed // 4 + 64, *rows.shape[2:]))
    larger[:, :filled] = rows[:, :filled]
    return larger


def move_up(rows: Tensor, n: int, entries: list[int]) -> None:
    """In ``rows`` (L, capacity, ...), move the rising ``entries`` to n, n + 1 and so on."""
    end = n + len(entries)
    if entries != list(range(n, end)):  # an accepted part of a chain is in its place already
        rows[:, n:end] = rows[:, to_device(entries, rows.device)]
