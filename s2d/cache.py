"""The KV cache: pre-allocated keys and values; append, attend, cut back, keep a path.

Knows nothing about models, drafts or trees.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries (B, H, T, D) to keys and values (B, G, S+T, D): (B, H, T, D).

    ``mask`` (R, S+T) is about the last R queries. Others stand before them only where S is 0: those
    of a prompt, which are causal. Kernels need no mask for that, so a prompt needs no square one.
    """
    T, gqa = q.shape[2], q.shape[1] != k.shape[1]
    if T == 1 and gqa:  # the heads of a group as queries: keys and values are read once
        grouped = q.reshape(*k.shape[:2], -1, q.shape[3])  # (B, G, H/G, D)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, enable_gqa=gqa)
    R = mask.shape[-2]
    if R == T:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    prompt = attend(q[:, :, :-R], k[:, :, :-R], v[:, :, :-R], None)
    return torch.cat((prompt, attend(q[:, :, -R:], k, v, mask)), dim=2)


class KVCache:
    """Keys and values of a run of layers, in slots that are filled from 0 up to ``length``.

    What is rejected is forgotten by moving ``length``; what is accepted of a tree moves together
    inside the cache. The rows of a batch are equally long, and decoding has one.
    """

    def __init__(self, num_layers, num_kv_heads, capacity, head_dim, device, dtype, batch=1):
        # Strides are the same whatever the capacity: a compiled pass serves every cache.
        shape = (num_layers, batch, capacity, num_kv_heads, head_dim)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.keys = keys.transpose(2, 3)  # (L, B, G, capacity, D)
        self.values = values.transpose(2, 3)  # (L, B, G, capacity, D)
        self.layers = list(zip(self.keys.unbind(), self.values.unbind()))  # views, made once
        self.length = 0

    def write(self, layer, keys, values):
        """Store one layer's new keys and values (B, G, T, D) behind the filled slots.

        Returns old and new together, (B, G, S+T, D) each. All layers write, then ``advance(T)``.
        """
        T = keys.shape[2]
        all_keys, all_values = self.layers[layer]
        all_keys.narrow(2, self.length, T).copy_(keys)
        all_values.narrow(2, self.length, T).copy_(values)
        end = self.length + T
        return all_keys.narrow(2, 0, end), all_values.narrow(2, 0, end)

    def attend(self, layer, q, k, v, mask):
        """``attend``, behind a ``write``."""
        return attend(q, *self.write(layer, k, v), mask)

    def advance(self, count):
        """Count so many more slots as filled."""
        self.length += count

    def keep(self, length, path):
        """Forget all from ``length`` on but the slots length + i, i in ``path``: they move up."""
        self.length = min(self.length, length + len(path))
        move_up(self.keys, length, path)
        move_up(self.values, length, path)


def move_up(rows, length, path):
    """In rows (..., S, D), put those at length + i, i in ``path`` (a list), directly at length."""
    if path != list(range(len(path))):  # what a chain accepts is where it belongs already
        rows[..., length : length + len(path), :] = rows[..., [length + i for i in path], :]
