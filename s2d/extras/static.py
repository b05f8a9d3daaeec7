"""Passes of static shape: a Llama whose short passes run compiled code, on a GPU recorded passes.

Knows nothing about decoding. A pass over a few tokens is mostly dispatch: some twenty operations a
layer, of microseconds each. So a block is compiled once for each size in ROWS (compiled.py), or
recorded (graphs.py). Its weights are arguments, and so is the length of the cache: one compiled
block runs every layer of every model of its shape, at every length. Fewer rows are padded. Nothing
reads what the padding leaves: the next pass overwrites its keys, and its columns are masked.
"""

from functools import partial

import torch
import torch.nn.functional as F

from ..model import Llama
from .compiled import compiled_block, compiled_head, run_block, shape_of, way_of
from .costs import SIZES, kept, quickest, size_of, time_passes
from .draft_head import draft_head
from .graphs import SHORTEST, Recordings, bucket
from .products import each_row, lay_out, products_of

ROWS = SIZES  # passes are padded up to these; prompts and large trees run as they are


class StaticLlama(Llama):
    """A Llama whose passes over few tokens behind a context are compiled, or recorded on a GPU.

    Recorded passes have one set of KV caches: on a GPU one generation at a time can use the model,
    as its target or as its draft. Passes are plain once weights were found changed; they are asked
    where a KV cache is made.
    """

    def __init__(self, config):
        super().__init__(config)
        self.compiled = True
        self.recordings = Recordings()
        self.sizes = ROWS  # that are compiled
        self.shape = shape_of(config)
        self.longest = config.max_position_embeddings + ROWS[-1]  # positions with the padding's
        new = partial(self.register_buffer, persistent=False)
        for table in ("rope_cos", "rope_sin"):
            new(table, F.pad(getattr(self, table), (0, 0, 0, ROWS[-1])))
        new("slots", torch.arange(self.longest, device="cpu"))
        chains = torch.full((ROWS[-1], 2 * self.longest + SHORTEST), -torch.inf, device="cpu")
        new("chains", chains.triu(diagonal=self.longest + 1))  # has every chain's mask as a part

    def prepare(self):
        """Compile for every size in ROWS. Raises ValueError where no C++ compiler works."""
        if on_gpu(self.device):  # there a pass is recorded when it is first needed
            return
        head = draft_head(self).rows if draft_head(self) else self.lm_head
        ways = [self.way(rows) for rows in ROWS]
        for rows, way in zip(ROWS, ways):
            compiled_block(self.shape, rows, self.dtype, way)
            compiled_head(self.shape, len(head.weight), rows, self.dtype, way)
        if self.config.max_position_embeddings < 2 * ROWS[-1]:  # too short to be timed
            return
        timed = kept(("compiled", self.config, self.dtype, ways), self.time_both)
        chosen = zip(ROWS, quickest(timed))  # at other sizes the plain pass is quicker
        self.sizes = [rows for rows, name in chosen if name == "compiled"]
        self.row_costs = each_row([min(pair) for pair in zip(*timed.values())])

    def time_both(self):
        """{name: seconds of passes over each of ROWS}, compiled and as they are."""
        lay_out(self)
        timed = {}
        for name, self.sizes in (("compiled", ROWS), ("plain", ())):
            timed[name] = time_passes(self)
        return timed

    def way(self, rows):
        """How a compiled pass over so many rows multiplies."""
        return way_of(rows, self.lm_head.names[size_of(rows)])

    def padded(self, rows):
        """The size that a pass over so many rows is padded up to; None where it stays plain."""
        size = next((size for size in ROWS if size >= rows), None)
        return size if size in self.sizes else None

    def new_cache(self, capacity, first=0, end=None, batch=1):
        if any(product.changed() for product in products_of(self)):
            self.sizes = ()
        padded_capacity = capacity + ROWS[-1]
        if not on_gpu(self.device) or batch > 1:
            return super().new_cache(padded_capacity, first, end, batch)
        end = self.config.num_hidden_layers if end is None else end
        new = partial(super().new_cache, first=first, end=end)
        return self.recordings.cache(first, end, padded_capacity, new)

    def run_layers(self, hidden, first=0, end=None, positions=None, mask=None, cache=None):
        B, T, _ = hidden.shape
        S = 0 if cache is None else cache.length
        rows = self.padded(T)
        if rows is None or S == 0 or B > 1 or S + T > self.longest - ROWS[-1]:
            return super().run_layers(hidden, first, end, positions, mask, cache)
        end = self.config.num_hidden_layers if end is None else end
        gpu = on_gpu(hidden.device)
        length = bucket(S + rows) if gpu else S + rows  # slots of the cache that the pass reads
        slots = self.slots[S : S + rows]  # of them, those that it writes
        if mask is None:
            mask = self.chains[:rows, self.longest - S : self.longest - S + length].contiguous()
        else:
            before = S + T - mask.shape[1]  # slots of which it says nothing: they are seen
            mask = F.pad(mask, (0, length - S - T), value=-torch.inf)
            mask = F.pad(mask, (before, 0, 0, rows - T)).contiguous()
        positions = slice(S, S + rows) if positions is None else F.pad(positions, (0, rows - T))
        rope = self.rope_cos[positions], self.rope_sin[positions]
        inputs = filled(hidden, rows), *rope, mask, slots
        if gpu:
            run = partial(self.blocks, partial(run_block, None), first, end, cache, length)
            hidden = self.recordings.run((cache, first, end, rows, length), run, inputs)
        else:
            way = self.way(rows)
            block = partial(compiled_block(self.shape, rows, hidden.dtype, way), way)
            hidden = self.blocks(block, first, end, cache, length, *inputs)
        cache.advance(T)
        return hidden[:, :T]

    def blocks(self, run, first, end, cache, length, hidden, cos, sin, mask, slots):
        """Hidden (1, rows, hidden) through layers first..end-1 by ``run``, as run_block."""
        for index in range(first, end):
            keys, values = (part.narrow(2, 0, length) for part in cache.layers[index - first])
            hidden = run(self.model["layers"][index], hidden, (cos, sin), mask, slots, keys, values)
        return hidden

    def logits(self, hidden, head=None):
        T = hidden.shape[-2]
        rows = self.padded(T)
        if rows is None or hidden.dim() != 2 or on_gpu(hidden.device):
            return super().logits(hidden, head)
        head, way = head.rows if head else self.lm_head, self.way(rows)
        run = compiled_head(self.shape, len(head.weight), rows, hidden.dtype, way)
        weight = head.packed if way == "by_layout" else head.weight
        return run(way, self.model["norm"], weight, filled(hidden, rows))[:T]


def on_gpu(device):
    return device.type == "cuda"


def filled(hidden, rows):
    """(..., T, hidden) -> (..., rows, hidden); the last is repeated: a norm may not bear zeros."""
    T = hidden.shape[-2]
    if T == rows:
        return hidden.contiguous()
    return torch.cat((hidden, *[hidden[..., -1:, :]] * (rows - T)), dim=-2)
