"""Passes that cost what their weights cost: one block of a Llama, compiled for a few numbers of rows, serves all its layers.

A pass over a few tokens is mostly dispatch: some twenty operations a layer for microseconds of arithmetic each. Here the
block of model.py is compiled once for each size in ROWS. Its weights are arguments, and so is the number of cached
positions; one compiled block runs every layer of every model of its shape, at every context length. Where rows are fewer than it
was compiled for they are padded, and nothing reads what the padding leaves behind: its keys lie where the next pass writes, and
its columns are masked. Knows nothing about decoding.
"""

import platform
import sys
import time
from functools import cache as memoised
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .model import Block, Llama, LlamaConfig, RMSNorm

# What passes are padded up to; longer ones, prompts and large trees, run as they are. In half precision processors have matrix
# instructions that pay off earlier.
ROWS, HALF_ROWS = (1, 2, 4, 8, 16), (1, 2, 4)
SHORTEST = 128  # places that a recorded pass looks at
OPTIONS = {  # of the compiler
    "max_fusion_size": 8,  # of more sums in one loop the parts would not fit a processor's registers
    "cpp_wrapper": True,  # one call into compiled code, not one for each of its loops
    "size_asserts": False,
}


class StaticLlama(Llama):
    """A Llama whose passes over few tokens behind a context are compiled; ``prepare`` does it before they are needed.

    On a GPU, which waits for launches rather than for dispatch, they are recorded instead (Replayed), into one set of
    caches: there one generation at a time can use such a model, and only as its target or as its draft.
    """

    def __init__(self, config):
        super().__init__(config)
        self.caches, self.replays = (
            {},
            {},
        )  # on a GPU: {(start, stop): KVCache}, {(cache, start, stop, rows, length): Replayed}
        self.shape = shape_of(config)
        self.longest = config.max_position_embeddings + ROWS[-1]  # places, the padding's too
        for table in ("rope_cos", "rope_sin"):
            self.register_buffer(
                table, F.pad(getattr(self, table), (0, 0, 0, ROWS[-1])), persistent=False
            )
        self.register_buffer("places", torch.arange(self.longest, device="cpu"), persistent=False)
        chains = torch.full((ROWS[-1], 2 * self.longest + SHORTEST), -torch.inf, device="cpu").triu(
            diagonal=self.longest + 1
        )
        self.register_buffer(
            "chains", chains, persistent=False
        )  # the mask of every chain is a part of it

    def prepare(self):
        """Compile for every size in ROWS. Raises ValueError where there is no C++ compiler."""
        if on_gpu(self.device):  # each pass is recorded when it is first needed, in an instant
            return
        check_compiler()
        for rows in sizes(self.lm_head.weight):
            compiled_block(self.shape, rows, self.dtype)
            compiled_head(
                self.shape,
                len(self.lm_head.weight if self.draft_head is None else self.draft_head),
                rows,
                self.dtype,
            )

    def new_cache(self, capacity, start=0, stop=None, batch=1):
        if not on_gpu(self.device) or batch > 1:
            return super().new_cache(
                capacity + ROWS[-1], start, stop, batch
            )  # padding needs room too
        stop, longest = (
            self.config.num_hidden_layers if stop is None else stop,
            bucket(capacity + ROWS[-1]),
        )
        if (start, stop) not in self.caches or self.caches[start, stop].keys.shape[3] < longest:
            former = self.caches.get((start, stop))
            self.caches[start, stop] = super().new_cache(longest, start, stop)
            self.replays = {
                key: replay for key, replay in self.replays.items() if key[0] is not former
            }
        cache = self.caches[start, stop]
        cache.keep(0, [])
        for part in (cache.keys, cache.values):
            part.zero_()  # what an earlier text left would be looked at under the mask, and might be no numbers
        return cache

    def run_layers(self, hidden, start=0, stop=None, positions=None, mask=None, cache=None):
        B, T, _ = hidden.shape
        S, gpu = 0 if cache is None else cache.length, on_gpu(hidden.device)
        if S == 0 or B > 1 or T > sizes(hidden)[-1] or S + T > self.longest - ROWS[-1]:
            return super().run_layers(hidden, start, stop, positions, mask, cache)
        rows, stop = padded_to(T), self.config.num_hidden_layers if stop is None else stop
        length = bucket(S + rows) if gpu else S + rows  # places of the cache that the pass looks at
        where = self.places[S : S + rows]  # of them, those it writes
        if mask is None:
            mask = self.chains[:rows, self.longest - S : self.longest - S + length].contiguous()
        else:
            mask = padded_mask(mask, S + T, rows, length)
        positions = slice(S, S + rows) if positions is None else F.pad(positions, (0, rows - T))
        rope = self.rope_cos[positions], self.rope_sin[positions]
        inputs = padded(hidden, rows), *rope, mask, where
        if gpu:
            key = cache, start, stop, rows, length
            if key not in self.replays:
                run = partial(self.blocks, run_block, start, stop, cache, length)
                self.replays[key] = Replayed(run, inputs)
            hidden = self.replays[key](*inputs)
        else:
            hidden = self.blocks(
                compiled_block(self.shape, rows, hidden.dtype), start, stop, cache, length, *inputs
            )
        cache.advance(T)
        return hidden[:, :T]

    def blocks(self, run, start, stop, cache, length, hidden, cos, sin, mask, where):
        """Hidden states (1, rows, hidden) through layers start..stop-1, by ``run`` (run_block, as it is or compiled)."""
        for index in range(start, stop):
            keys, values = (part.narrow(2, 0, length) for part in cache.layers[index - start])
            hidden = run(self.model["layers"][index], hidden, (cos, sin), mask, where, keys, values)
        return hidden

    def logits(self, hidden):
        return self.compiled_logits(super().logits, self.lm_head.weight, hidden)

    def draft_logits(self, hidden):
        if self.draft_vocabulary is None:
            return self.logits(hidden)
        return self.compiled_logits(super().draft_logits, self.draft_head, hidden)

    def compiled_logits(self, eager, head, hidden):
        """Hidden states (R, hidden) -> logits (R, V) by the rows of ``head`` (V, hidden); all others as ``eager`` does it."""
        if on_gpu(hidden.device) or hidden.dim() != 2 or len(hidden) > sizes(hidden)[-1]:
            return eager(hidden)
        rows = padded_to(len(hidden))
        run = compiled_head(self.shape, len(head), rows, hidden.dtype)
        return run(self.model["norm"], head, padded(hidden, rows))[: len(hidden)]


def static_twin(model):
    """The StaticLlama with the weights of ``model``, in the same memory where they lie by rows, as compiled passes ask."""
    with torch.device("meta"):
        twin = StaticLlama(model.config)
    twin.load_state_dict(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, assign=True
    )
    if model.draft_vocabulary is not None:
        twin.keep_tokens(model.draft_vocabulary)
    twin.to(device=model.device, dtype=model.dtype).eval().prepare()
    return twin


class Replayed:
    """A pass whose kernel launches are recorded once, at fixed places in memory, and then replayed as one (CUDA graphs).

    What a call returns is a copy: the next replay writes to the same memory.
    """

    def __init__(self, function, example):
        self.inputs = [tensor.clone() for tensor in example]
        for _ in range(
            2
        ):  # libraries set themselves up in their first calls, which cannot be recorded
            function(*self.inputs)
        self.replay, self.output = recorded(function, self.inputs)

    def __call__(self, *inputs):
        for own, new in zip(self.inputs, inputs):
            own.copy_(new)
        self.replay()
        return self.output.clone()


def recorded(function, inputs):
    """``function(*inputs)`` as a CUDA graph: (what runs it again, the tensor it writes)."""
    graph, device = torch.cuda.CUDAGraph(), inputs[0].device
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        output = function(*inputs)
    return graph.replay, output


def on_gpu(device):
    return device.type == "cuda"


def sizes(tensor):
    """The numbers of rows that passes are compiled for, on the device and in the dtype of ``tensor``."""
    return ROWS if tensor.dtype.itemsize >= 4 or on_gpu(tensor.device) else HALF_ROWS


def padded_to(rows):
    """The size a pass over so many rows is padded up to."""
    return next(size for size in ROWS if size >= rows)


def padded(hidden, rows):
    """Hidden states (..., T, hidden) -> (..., rows, hidden) in one piece: the last one again, as a norm may not bear zeros."""
    T = hidden.shape[-2]
    if T == rows:
        return hidden.contiguous()
    return torch.cat((hidden, *[hidden[..., -1:, :]] * (rows - T)), dim=-2)


def bucket(length):
    """A context of so many places, rounded up to the next power of two: few lengths, none twice as long as needed."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def padded_mask(mask, length, rows, columns):
    """A mask (T, C) about the last C of ``length`` places -> (rows, columns), where none of the T sees the new columns."""
    T, C = mask.shape
    return F.pad(
        F.pad(mask, (0, columns - length), value=-torch.inf), (length - C, 0, 0, rows - T)
    ).contiguous()


def shape_of(config):
    """All of a config that the compiled code of a block depends on."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
    )
    return LlamaConfig(
        vocab_size=1, num_hidden_layers=1, **{name: getattr(config, name) for name in names}
    )


@memoised
def compiled_block(shape, rows, dtype):
    """``run_block`` for blocks of one ``shape``, so many rows and any number of cached positions."""
    new = partial(torch.zeros, dtype=dtype)
    length = 8 * rows + 5  # any number but one that means something else here
    rope = new(2, rows, shape.head_dim).unbind()
    keys, values = (
        new(1, length, shape.num_key_value_heads, shape.head_dim).transpose(1, 2) for _ in range(2)
    )
    mask = new(rows, length)
    for tensor, dim in ((keys, 2), (values, 2), (mask, 1)):
        torch._dynamo.mark_dynamic(tensor, dim)
    block, hidden = Block(shape).to(dtype).requires_grad_(False), new(1, rows, shape.hidden_size)
    example = block, hidden, rope, mask, torch.arange(rows), keys, values
    return compiled(
        run_block, example, f"a block of width {shape.hidden_size}, rows: {rows}", (shape, dtype)
    )


@memoised
def compiled_head(shape, tokens, rows, dtype):
    """``run_head`` for ``tokens`` logits of so many rows."""
    norm, new = (
        RMSNorm(shape.hidden_size, shape.rms_norm_eps).to(dtype),
        partial(torch.zeros, dtype=dtype),
    )
    example = (
        norm.requires_grad_(False),
        new(tokens, shape.hidden_size),
        new(rows, shape.hidden_size),
    )
    return compiled(run_head, example, f"a head of {tokens} tokens, rows: {rows}", (shape, dtype))


def compiled(function, example, what, details):
    """``function``, a pass, compiled for arguments like those of ``example``; ``what`` and ``details`` tell it from others.

    It is kept in PyTorch's own cache on disk, beside what else it compiles; where it has to be made, stderr says so, and how
    long it took. What is the same in all calls is not checked in each of them: callers keep to the example's shapes.
    """
    from torch._inductor.runtime.cache_dir_utils import (
        cache_dir,
    )  # here, as it takes a second to import

    sources = [Path(__file__).with_name(name).read_bytes() for name in ("model.py", "static.py")]
    made_with = (
        platform.node(),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        sources,
    )
    file = Path(cache_dir()) / "s2d" / sha256(repr((what, details, made_with)).encode()).hexdigest()
    try:
        with file.open("rb") as opened:
            result = torch.compiler.load_compiled_function(opened)
    except Exception:  # not there, or not whole: whatever is wrong with it, it is made again
        began = time.monotonic()
        print(f"compiling {what} ...", end="", file=sys.stderr, flush=True)
        try:
            result = torch.compile(
                function, fullgraph=True, dynamic=False, options=OPTIONS
            ).aot_compile((example, {}))
            file.parent.mkdir(parents=True, exist_ok=True)
            result.save_compiled_function(file)
        except Exception as error:  # a compiler that does not work, a cache that cannot be written
            print(file=sys.stderr)
            reason = str(error).strip().splitlines()[:1]
            raise ValueError(
                f"{what} could not be compiled ({reason}); is the C++ compiler in order, and is there room in {cache_dir()}?"
            ) from None
        print(f" {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    result.disable_guard_check()
    return result


class Written:
    """A cache to a block that is compiled: one layer's keys and values (1, G, S+T, D), of which the pass writes places ``where``."""

    def __init__(self, where, keys, values):
        self.where, self.keys, self.values = where, keys, values

    def write(self, layer, keys, values):
        self.keys.index_copy_(2, self.where, keys)
        self.values.index_copy_(2, self.where, values)
        return self.keys, self.values


def check_compiler():
    """Raise ValueError where PyTorch finds no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise ValueError(
            "compiling needs a C++ compiler; none is found: install g++, name one in CXX, or leave it out"
        ) from None


def run_block(block, hidden, rope, mask, where, keys, values):
    """Hidden states (1, T, hidden) through one block."""
    if hidden.is_cuda:
        return block(hidden, rope, mask, Written(where, keys, values), 0)
    with Streaming():
        return block(hidden, rope, mask, Written(where, keys, values), 0)


def run_head(norm, head, hidden):
    """Hidden states (R, hidden) -> logits (R, V)."""
    with Streaming():
        return F.linear(norm(hidden), head)


class Streaming(TorchFunctionMode):
    """Shows the compiler sums in place of matrix products and attention, which it would leave to libraries made for many rows.

    With a few rows a product costs what reading its weights costs, if all rows meet a weight while it is at hand: sums, one
    a row, that the compiler fuses into one loop over the weights.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            return product(*args[:2])
        if function is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        return function(*args, **(kwargs or {}))


def product(x, weight):
    """x (..., T, in) times ``weight`` (out, in) -> (..., T, out); as F.linear."""
    x = x.contiguous()
    x = x.as_strided(
        x.shape, x.stride()
    )  # this the compiler has in memory first, not anew for each of its uses
    return torch.stack([(weight * row).sum(dim=-1) for row in x.flatten(0, -2)]).view(
        *x.shape[:-1], -1
    )


def attention(q, k, v, attn_mask, enable_gqa):
    """As F.scaled_dot_product_attention, of which the arguments are."""
    B, H, T, D = q.shape
    if (
        T > 1
    ):  # the heads of a group together; here libraries are as fast, and sums take long to compile
        scores = (
            q.reshape(B, k.shape[1], -1, D) * D**-0.5 @ k.transpose(-1, -2)
        )  # (B, G, H/G * T, S)
        probs = (scores.view(B, k.shape[1], -1, T, k.shape[2]) + attn_mask).softmax(dim=-1)
        return (probs.flatten(2, 3) @ v).view(B, H, T, D)
    q = q.reshape(B, k.shape[1], -1, 1, D) * D**-0.5  # (B, G, H/G, 1, D)
    scores = (q * k[:, :, None]).sum(dim=-1) + attn_mask  # (B, G, H/G, S)
    return (scores.softmax(dim=-1)[..., None] * v[:, :, None]).sum(dim=-2).view(B, H, T, D)
