"""Static passes: passes over a few rows in which only numbers change.

A pass over a few tokens is some 25 kernels per layer, of microseconds each, and on a GPU launching
them one by one takes longer than running them. A CUDA graph launches them all at once (graphs.py),
but then they are always the same kernels on the same memory. So passes are padded to a few shapes.
For each segment of layers (all layers of a target; those between two exits of a draft) there are

- one memory for keys and values, which one cache at a time may use;
- static inputs for each number of rows in SIZES, and for each number of columns, the entries of the
  memory to which rows may attend: 256, 512, 1024, ...

Prompts, larger trees and passes of several prompts are run as in any Llama. So are the embedding
and the LM head, what moves accepted nodes together (``KVCache.keep``), and all that the CPU waits
for: a confidence, the tokens of a level, and the target's choices.
"""

import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVCache, next_size
from ..model import Llama

SIZES = 1, 2, 4, 8, 16, 32, 64  # rows
COLUMNS = 256  # the fewest; a mask's rows are aligned as kernels for a GPU need it


class Slots(KVCache):
    """A segment's memory as a static pass uses it: written at ``slots``, read up to ``columns``."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]], slots: Tensor, columns: int) -> None:
        self.layers = layers
        self.slots = slots  # (rows,)
        self.columns = columns
        self.length = 0  # not used: a pass has a mask and positions

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        keys.index_copy_(2, self.slots, k)
        values.index_copy_(2, self.slots, v)
        return keys.narrow(2, 0, self.columns), values.narrow(2, 0, self.columns)

    def advance(self, count: int) -> None:
        pass


class StaticInputs:
    """What a static pass reads: tensors that stay where they are, for all passes of its shape."""

    def __init__(self, segment: "Segment", hidden_size: int, rows: int, columns: int) -> None:
        place = dict(device=segment.memory.keys.device, dtype=segment.memory.keys.dtype)
        self.first = segment.first
        self.end = segment.end
        self.hidden = torch.zeros(1, rows, hidden_size, **place)
        self.positions = torch.zeros(rows, dtype=torch.long, device=place["device"])
        self.slots = torch.zeros(rows, dtype=torch.long, device=place["device"])
        self.mask = torch.zeros(rows, columns, **place)
        self.cache = Slots(segment.memory.layers, self.slots, columns)
        self.made = segment.made

    def fill(
        self, hidden: Tensor, length: int, positions: Tensor | None, mask: Tensor | None
    ) -> None:
        """Copy the arguments of ``Llama.run_layers`` after ``length`` entries, and pad them.

        The padding is written anew each time: what an earlier pass left there could be out of
        range, or NaN. Its keys and values lie after those of the pass, where the next pass writes.
        """
        T = hidden.shape[1]
        rows = len(self.slots)
        if positions is None:
            positions = torch.arange(length, length + T, device=hidden.device)
        self.hidden.copy_(F.pad(hidden, (0, 0, 0, rows - T)))
        self.positions.copy_(F.pad(positions, (0, rows - T)))
        torch.arange(length, length + rows, out=self.slots)
        self.mask.fill_(-torch.inf)
        self.mask[:T, : length + T] = 0.0 if mask is None else mask
        # Some kernels give NaN for a row that attends to nothing, and NaN times a weight of 0 is
        # NaN.
        self.mask[T:, 0] = 0.0


class Segment:
    """Layers first..end-1 of a model: a memory for their keys and values, and static inputs."""

    def __init__(self, first: int, end: int, memory: KVCache) -> None:
        self.first = first
        self.end = end
        self.memory = memory
        self.capacity = memory.keys.shape[3]
        self.inputs: dict[tuple[int, int], StaticInputs] = {}  # by rows and columns
        self.made: dict[Any, Any] = {}  # what a class of StaticLlama makes to run them
        self.user: weakref.ref[StaticCache] | None = None  # the memory's, while it exists

    def columns(self, entries: int) -> int:
        """COLUMNS times a power of 2, with room for ``entries``; at most all that there are."""
        return min(double_up_to(entries), self.capacity)


def double_up_to(entries: int) -> int:
    """COLUMNS times a power of 2, and not below ``entries``."""
    doubled = COLUMNS
    while doubled < entries:
        doubled *= 2
    return doubled


class StaticCache(KVCache):
    """An empty cache in the memory of a segment, which the memory's last user has to leave."""

    def __init__(self, segment: Segment) -> None:
        last = segment.user() if segment.user is not None else None
        if last is not None:
            last.leave()
        segment.user = weakref.ref(self)
        self.segment: Segment | None = segment  # None: it has left
        self.capacity = segment.capacity
        self.keys = segment.memory.keys
        self.values = segment.memory.values
        self.layers = segment.memory.layers
        self.length = 0
        with torch.inference_mode():
            self.keys.zero_()  # entries that are masked must not be NaN
            self.values.zero_()

    def leave(self) -> None:
        """Go on in memory of its own; passes are not static from now on."""
        self.move(next_size(self.length, self.capacity))
        self.segment = None


class StaticLlama(Llama):
    """A Llama whose passes over a few tokens after a context are static.

    A class of it makes them fast by another ``run_static``. From the first pass on the model must
    stay where it is, in its dtype, with its weights: neither moved nor trained nor loaded anew.
    Passes with a cache are for inference.
    """

    def __init__(self, config: Any, drafting: Any = None) -> None:
        super().__init__(config, drafting)
        self.segments: dict[tuple[int, int], Segment] = {}  # by the first layer and the end

    def new_cache(self, capacity: int, first: int = 0, end: int | None = None) -> KVCache:
        """As in Llama, but in static memory until there is another cache of the same layers."""
        if end is None:
            end = self.config.num_hidden_layers
        needed = capacity + SIZES[-1]  # with room for the padding
        segment = self.segments.get((first, end))
        if segment is None or segment.capacity < needed:
            self.segments.pop((first, end), None)  # before there is memory for the new one
            # Doubled, so that longer and longer texts seldom need new memory, and new passes; but
            # not far beyond the longest text.
            longest = max(capacity, self.config.max_position_embeddings) + SIZES[-1]
            entries = min(double_up_to(needed), COLUMNS * math.ceil(longest / COLUMNS))
            memory = super().new_cache(entries, first, end)
            memory.reserve(entries)  # at once: it must stay where it is
            segment = Segment(first, end, memory)
            self.segments[first, end] = segment
        return StaticCache(segment)

    def run_layers(
        self,
        hidden: Tensor,
        first: int = 0,
        end: int | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        if not isinstance(cache, StaticCache):
            return super().run_layers(hidden, first, end, positions, mask, cache)
        with torch.inference_mode():
            T = hidden.shape[1]
            S = cache.length
            prompt = S == 0 or T > SIZES[-1]
            if prompt or cache.segment is None or (mask is None and T > 1):
                return super().run_layers(hidden, first, end, positions, mask, cache)
            inputs = self.inputs(cache.segment, T, S)
            inputs.fill(hidden, S, positions, mask)
            # A copy, because the next pass may have its result in the same place.
            hidden = self.run_static(inputs)[:, :T].clone()
            cache.advance(T)
            return hidden

    def inputs(self, segment: Segment, T: int, S: int) -> StaticInputs:
        """The smallest that hold T rows after S entries."""
        rows = next(size for size in SIZES if size >= T)
        columns = segment.columns(S + rows)
        if (rows, columns) not in segment.inputs:
            made = StaticInputs(segment, self.config.hidden_size, rows, columns)
            segment.inputs[rows, columns] = made
        return segment.inputs[rows, columns]

    def run_static(self, inputs: StaticInputs) -> Tensor:
        """``inputs`` through their layers: (1, rows, hidden). It is always the same work."""
        return super().run_layers(
            inputs.hidden,
            inputs.first,
            inputs.end,
            positions=inputs.positions,
            mask=inputs.mask,
            cache=inputs.cache,
        )
