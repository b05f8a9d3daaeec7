"""The KV cache: keys and values of a run of layers, allocated once, and attention over them."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

WIDE = 1024  # H·D from which it pays on a CPU to fold groups of heads, see ``attend``


class Cache(Protocol):
    """What a pass through a model's layers asks of a KV cache."""

    length: int  # positions that it holds

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Store the new keys and values of a layer, then attend to all that are stored."""

    def advance(self, count: int) -> None:
        """Count the new positions, once every layer has stored theirs."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries (B, H, T, D) to keys and values (B, G, S+T, D): (B, H, T, D).

    ``mask`` (T, S+T) is added to the scores. Without a mask, attention is causal if S = 0, and a
    single query (T = 1) attends to everything. G divides H: H/G query heads share a key head.
    """
    H, T, D = q.shape[1:]
    G = k.shape[1]
    masked = mask is not None
    if G < H and (T == 1 or (masked and (H * D >= WIDE or not q.is_cpu))):
        # The same result, faster: the heads of a group become queries of one head, so that its keys
        # and values are read once. A GPU has no fast kernel for grouped heads with a mask. On a
        # CPU, copying the mask takes longer than it saves if the heads are small.
        q = q.reshape(-1, G, H // G * T, D)
        if masked:
            mask = mask.repeat(H // G, 1)  # (H/G·T, S+T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(-1, H, T, D)
    # Without a mask, several queries have no cache before them (``Llama.run_layers`` sees to it).
    causal = not masked and T > 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=G < H
    )


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

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Store ``k`` and ``v`` (1, G, T, D) after the filled entries, and attend to all S+T.

        ``layer`` counts from the first layer of the cache. Once every layer has stored its keys and
        values, ``advance``.
        """
        T = k.shape[2]
        end = self.length + T
        keys, values = self.layers[layer]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return attend(q, keys.narrow(2, 0, end), values.narrow(2, 0, end), mask)

    def advance(self, count: int) -> None:
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
        rows[..., n : n + len(offsets), :] = rows[..., [n + i for i in offsets], :]
