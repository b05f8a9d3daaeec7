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
        self.keys = torch.zeros(shape, device=device, dtype=dtype).transpose(2, 3)
        self.values = torch.zeros(shape, device=device, dtype=dtype).transpose(2, 3)
        self.layers = list(zip(self.keys.unbind(), self.values.unbind()))  # (1, G, capacity, D)
        self.length = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (1, G, T, D) of a layer behind the filled slots.

        Returns those of the layer from slot 0 on, (1, G, S+T, D) each. ``advance`` follows once all
        layers have written.
        """
        T = keys.shape[2]
        all_keys, all_values = self.layers[layer]
        all_keys.narrow(2, self.length, T).copy_(keys)
        all_values.narrow(2, self.length, T).copy_(values)
        end = self.length + T
        return all_keys.narrow(2, 0, end), all_values.narrow(2, 0, end)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Write ``k`` and ``v``, then attend to all that is stored (see the function above)."""
        keys, values = self.write(layer, k, v)
        return attend(q, keys, values, mask)

    def advance(self, count: int):
        self.length += count

    def keep(self, length: int, path: list[int]):
        """Roll back to ``length`` slots and those at length + i for i in ``path``, moved up."""
        self.length = min(self.length, length + len(path))
        move_up(self.keys, length, path)
        move_up(self.values, length, path)


def move_up(rows: Tensor, length: int, path: list[int]):
    """In rows (..., S, D), move those at length + i for i in ``path`` to ``length`` and on."""
    if path != list(range(len(path))):  # the accepted part of a chain is in its place already
        slots = [length + i for i in path]
        rows[..., length : length + len(path), :] = rows[..., slots, :]
