"""A Llama whose short passes run compiled code of static shape.

A pass over a few tokens is mostly dispatch: some twenty operations per layer, of microseconds each.
So a block is compiled once for each number of rows in SIZES (compiled.py), and fewer rows are
padded. Nothing reads what the padding leaves: its columns are masked, and the next pass overwrites
its keys and values.
"""

import torch
import torch.nn.functional as F

from ..model import Llama
from ..ngram.costs import SIZES
from . import is_large
from .compiled import compiled_passes
from .linear import can_pack, fast_linears, replace_linears, use_fastest


class CompiledLlama(Llama):
    """A Llama whose passes over few tokens after a context are compiled, once it is prepared.

    Prompts, large trees and passes of several prompts run as in any Llama.
    """

    def __init__(self, config, drafting=None):
        super().__init__(config, drafting)
        self.blocks, self.heads = {}, {}  # {rows: function that runs a block, or norm and head}
        self.plain = super().run_layers

    def prepare(self):
        """Compile, which takes a minute, or seconds if that was done before.

        Raises ValueError where no C++ compiler works. On a GPU, passes are compiled when they first
        run (torch.compile); that was not tried on one.
        """
        if self.device.type != "cpu":
            # After 8 kinds of passes the compiler would leave the others to eager code in silence.
            torch._dynamo.config.recompile_limit = 64
            self.plain = torch.compile(self.plain, dynamic=True)
            return
        replace_linears(self)
        for rows in SIZES:
            self.blocks[rows], self.heads[rows] = compiled_passes(self, rows)
        use_fastest(self)  # for passes that are not compiled
        if is_large(self) and can_pack(self.dtype):
            for linear in fast_linears(self):
                linear.keep_plain = True  # compiled sums read it
                linear.pack()

    def padded(self, rows):
        """The number of rows that a pass is padded to; None if it is not compiled."""
        return next((size for size in self.blocks if size >= rows), None)

    def new_cache(self, capacity, first=0, end=None):
        return super().new_cache(capacity + SIZES[-1], first=first, end=end)  # for the padding

    def run_layers(self, hidden, first=0, end=None, positions=None, mask=None, cache=None):
        T = hidden.shape[1]
        S = 0 if cache is None else cache.length
        rows = self.padded(T)
        if S == 0:
            return super().run_layers(hidden, first, end, positions, mask, cache)
        if rows is None:
            return self.plain(hidden, first, end, positions, mask, cache)
        if positions is None:
            positions = torch.arange(S, S + T)
        if mask is None:
            mask = hidden.new_zeros(T, S + T)
        added, length = rows - T, S + rows
        hidden = F.pad(hidden, (0, 0, 0, added)).contiguous()
        mask = F.pad(mask, (0, added), value=-torch.inf)
        mask = F.pad(mask, (0, 0, 0, added)).contiguous()
        positions = F.pad(positions, (0, added))
        cos, sin = self.rope(positions)
        slots = torch.arange(S, length)
        cache.reserve(length)
        run = self.blocks[rows]
        for block, (keys, values) in zip(self.model.layers[first:end], cache.layers):
            keys, values = keys.narrow(2, 0, length), values.narrow(2, 0, length)
            hidden = run(block, hidden, cos, sin, mask, slots, keys, values)
        cache.advance(T)
        return hidden[:, :T]

    def logits(self, hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])  # (T, hidden)
        T, rows = len(flat), self.padded(len(flat))
        if rows is None:
            return super().logits(hidden)
        flat = F.pad(flat, (0, 0, 0, rows - T)).contiguous()
        logits = self.heads[rows](self.model.norm, self.lm_head, flat)
        return logits[:T].view(*hidden.shape[:-1], -1)
