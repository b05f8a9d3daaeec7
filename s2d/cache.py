"""The KV cache: keys and values of a run of layers, allocated once, and attention over them."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries (B, H, T, D) to keys and values (B, G, S+T, D): (B, H, T, D).

    ``mask`` (T, S+T) is added to the scores. Without one attention is causal if S = 0, and a single
    query (T = 1) sees everything.
    """
    T, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if T == 1 and grouped:  # the heads of a group as queries: keys and values are read once
        queries = q.reshape(*k.shape[:2], -1, q.shape[3])  # (B, G, H/G, D)
        return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask).reshape(q.shape)
    # PyTorch aligns is_causal to the top left: behind a cache it would hide the cache's end.
    causal = mask is None and T > 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


class KVCache:
    """Keys and values of a run of layers, in slots that are filled from 0 up to ``length``.

    Rejected tokens are forgotten by lowering ``length``; the accepted nodes of a tree move up
    inside the cache. Nothing is ever concatenated.
    """

    def __init__(self, shape: tuple[int, ...], device, dtype):
        """``shape``: layers, 1, capacity, key/value heads, head size."""
        # In memory the heads of a slot lie together, so that new ones are written in one piece.
        self.keys = torch.zeros(shape, device=device, dtype=dtype).transpose(2, 3)
        self.values = torch.zeros(shape, device=device, dtype=dtype).transpose(2, 3)
        self.layers = list(zip(self.keys.unbind(), self.values.unbind()))  # (1, G, capacity, D)
        self.length = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store ``k`` and ``v`` (1, G, T, D) behind the filled slots, and attend to all S+T.

        ``layer`` counts from the cache's first. Once every layer has stored its own, ``advance``.
        """
        T, end = k.shape[2], self.length + k.shape[2]
        keys, values = self.layers[layer]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return attend(q, keys.narrow(2, 0, end), values.narrow(2, 0, end), mask)

    def advance(self, count: int):
        self.length += count

    def keep(self, length: int, slots: list[int]):
        """Roll back to ``length`` slots and those at length + i for i in ``slots``, moved up.

        ``slots`` is empty where fewer than ``length`` are filled.
        """
        self.length = min(self.length, length + len(slots))
        move_up(self.keys, length, slots)
        move_up(self.values, length, slots)


def move_up(rows: Tensor, length: int, slots: list[int]):
    """In rows (..., S, D), move those at length + i for i in ``slots`` to ``length`` and on."""
    if slots != list(range(len(slots))):  # the accepted part of a chain is in its place already
        rows[..., length : length + len(slots), :] = rows[..., [length + i for i in slots], :]
