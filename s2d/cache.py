"""Pre-allocated keys and values. Knows nothing about models, drafts or trees."""

import torch


class KVCache:
    """Keys and values of a run of layers, filled from position 0 up to ``length``.

    The storage is allocated once for ``capacity`` positions; what is rejected is forgotten by moving ``length``, what
    is accepted of a tree moves together inside it. Shapes follow scaled_dot_product_attention: (B, G, S, D) per layer; the
    rows of a batch are all equally long, and decoding has one.
    """

    def __init__(self, num_layers, num_kv_heads, capacity, head_dim, device, dtype, batch=1):
        shape = (
            num_layers,
            batch,
            capacity,
            num_kv_heads,
            head_dim,
        )  # so that strides are the same whatever the capacity
        self.keys = torch.zeros(shape, device=device, dtype=dtype).transpose(
            2, 3
        )  # (L, B, G, capacity, D)
        self.values = torch.zeros(shape, device=device, dtype=dtype).transpose(
            2, 3
        )  # (L, B, G, capacity, D)
        self.layers = list(
            zip(self.keys.unbind(), self.values.unbind())
        )  # views, so that no step indexes anew
        self.length = 0

    def write(self, layer, keys, values):
        """Store one layer's new keys and values (B, G, T, D) after the filled part; return old and new together.

        ``length`` does not move yet: every layer of the run writes the same T positions, then ``advance(T)``.
        """
        T, (all_keys, all_values) = keys.shape[2], self.layers[layer]
        all_keys.narrow(2, self.length, T).copy_(keys)
        all_values.narrow(2, self.length, T).copy_(values)
        end = self.length + T
        return all_keys.narrow(2, 0, end), all_values.narrow(2, 0, end)  # (B, G, S+T, D) each

    def advance(self, count):
        """Count ``count`` more positions as filled, once all layers have written them."""
        self.length += count

    def keep(self, length, places):
        """Forget everything from ``length`` on but the given places after it (a list), which move up in that order."""
        self.length = min(self.length, length + len(places))
        move_up(self.keys, length, places)
        move_up(self.values, length, places)


def move_up(rows, length, places):
    """In rows (..., S, D), put the given ``places`` behind ``length`` (a list) directly behind it, in that order."""
    if places != list(range(len(places))):  # what a chain accepts is in its place already
        rows[..., length : length + len(places), :] = rows[
            ..., [length + place for place in places], :
        ]
