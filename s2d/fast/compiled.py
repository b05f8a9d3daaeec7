"""Compiled code for a block and the head of a Llama: made once, kept, for any context length.

A matmul of a few rows takes as long as reading the weights, if each is read once for all rows; but
libraries are made for many rows. So for a few rows the compiler is shown a sum per row, and fuses
the sums into one loop over the weights. For more it calls the library.
"""

import sys
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ..cache import KVCache, attend
from ..model import Block, LlamaConfig, RMSNorm
from .costs import cache_folder, key_of
from .linear import FastLinear, can_pack, fast_linears, packed_linear, replace_linears

FEW = 2  # rows for which sums are always the fastest
MOST_SUMS = 8  # rows; for more the library is ahead, whichever way it is asked
SOURCES = "model.py", "cache.py", "fast/linear.py", "fast/compiled.py"  # of what is compiled
OPTIONS = {  # of the compiler; flags are in the names of what it makes, so finding needs them too
    "max_fusion_size": MOST_SUMS,  # more sums in one loop would not fit the registers
    "cpp_wrapper": True,  # one call into compiled code, not one for each of its loops
    "cpp.enable_floating_point_contract_flag": "fast",  # one instruction multiplies and adds
    "size_asserts": False,
    "cpp_cache_precompile_headers": False,  # they would lie in the temporary directory
}


def shape_of(config):
    """All of a config that the compiled code of a block depends on."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(config, name) for name in (*names, "head_dim", "rms_norm_eps")}
    return LlamaConfig(vocab_size=1, num_hidden_layers=1, **sizes)


class Slots(KVCache):
    """The KV cache of a compiled block: keys and values (1, G, S+T, D), written at ``slots``."""

    def __init__(self, slots, keys, values):
        self.slots, self.keys, self.values = slots, keys, values

    def attend(self, layer, q, k, v, mask):
        # Not index_copy_: compiled, that copies the whole cache onto itself.
        self.keys[:, :, self.slots] = k
        self.values[:, :, self.slots] = v
        B, H, T, D = q.shape
        if T > 1:
            return attend(q, self.keys, self.values, mask)
        # One query as plain sums, which the compiler fuses.
        q = q.reshape(B, k.shape[1], -1, 1, D) * D**-0.5  # (B, G, H/G, 1, D)
        scores = (q * self.keys[:, :, None]).sum(dim=-1) + mask  # (B, G, H/G, S+1)
        weighted = scores.softmax(dim=-1)[..., None] * self.values[:, :, None]
        return weighted.sum(dim=-2).view(B, H, 1, D)


def run_block(block, hidden, cos, sin, mask, slots, keys, values):
    """Hidden states (1, T, hidden) through one block."""
    return block(hidden, (cos, sin), mask, Slots(slots, keys, values), 0)


def run_head(norm, head, hidden):
    return head(norm(hidden))  # (R, hidden) -> (R, V)


def sums(x, weight):
    """F.linear with one sum per row, which the compiler fuses into one loop over the weights."""
    x = x.contiguous()
    x = x.as_strided(x.shape, x.stride())  # has the compiler store x once, not once per use
    each = [(weight * row).sum(dim=-1) for row in x.flatten(0, -2)]
    return torch.stack(each).view(*x.shape[:-1], -1)


def use_compiled(module, rows, dtype, packs):
    """Give the FastLinears of ``module`` their kernel for ``rows``; returns its name.

    ``packs``: whether the weights are to be packed.
    """
    kernel = packed_linear if packs and can_pack(dtype) else F.linear
    if rows <= FEW or (rows <= MOST_SUMS and kernel is F.linear):
        kernel = sums
    for linear in fast_linears(module):
        linear.few, linear.few_kernel = (0 if kernel is packed_linear else rows), kernel
    return kernel.__name__


@cache
def compiled_block(shape, rows, dtype, packs):
    """``run_block`` for so many rows, all blocks of one ``shape`` and any length of the cache."""
    new = partial(torch.zeros, dtype=dtype)
    block = Block(shape).to(dtype).requires_grad_(False)
    replace_linears(block)
    kernel = use_compiled(block, rows, dtype, packs)
    length = 8 * rows + 5  # any number but one that means something else here
    kv_shape = 1, length, shape.num_key_value_heads, shape.head_dim
    keys, values = (new(kv_shape).transpose(1, 2) for _ in range(2))
    mask = new(rows, length)
    for tensor, dim in ((keys, 2), (values, 2), (mask, 1)):
        torch._dynamo.mark_dynamic(tensor, dim)
    hidden, (cos, sin) = new(1, rows, shape.hidden_size), new(2, rows, shape.head_dim).unbind()
    example = block, hidden, cos, sin, mask, torch.arange(rows), keys, values
    what = f"a block of width {shape.hidden_size}, rows: {rows}"
    return compiled(run_block, example, what, key=[shape, dtype, kernel])


@cache
def compiled_head(shape, tokens, rows, dtype, packs):
    """``run_head`` for a vocabulary of ``tokens`` and so many rows."""
    norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps).to(dtype).requires_grad_(False)
    weight, hidden = (torch.zeros(n, shape.hidden_size, dtype=dtype) for n in (tokens, rows))
    head = FastLinear(nn.Parameter(weight, requires_grad=False))
    kernel = use_compiled(head, rows, dtype, packs)
    what = f"a head of {tokens} tokens, rows: {rows}"
    return compiled(run_head, (norm, head, hidden), what, key=[shape, dtype, kernel])


def compiled(function, example, what, key):
    """``function``, compiled for arguments like those of ``example``, or found.

    It is kept in the cache directory, under ``what`` and ``key``. Calls check no shapes or other
    conditions: callers keep to the example's.
    """
    from torch._inductor import config, utils  # takes a second to import

    teach_compiler()
    folder = cache_folder() / "compiled"
    sources = [(Path(__file__).parents[1] / name).read_bytes() for name in SOURCES]
    file = folder / key_of(what, key, sources)
    with utils._set_env("TORCHINDUCTOR_CACHE_DIR", str(folder)), config.patch(OPTIONS):
        try:
            with file.open("rb") as opened:
                result = torch.compiler.load_compiled_function(opened)
        except Exception:  # not there, or damaged in any way: it is made again
            result = compile_to(file, function, example, what)
    result.disable_guard_check()
    return result


def compile_to(file, function, example, what):
    """``function``, compiled and written to ``file``; stderr says so."""
    print(f"compiling {what}", file=sys.stderr, flush=True)
    try:
        result = torch.compile(function, fullgraph=True, dynamic=False).aot_compile((example, {}))
        file.parent.mkdir(exist_ok=True)
        result.save_compiled_function(file)
    except Exception as error:  # a compiler that does not work, a folder that cannot be written
        reason = str(error).strip().partition("\n")[0]
        needs = f"a C++ compiler (g++, or what CXX names) and space in {file.parent}"
        raise ValueError(f"--compile needs {needs}: {reason}") from None
    return result


# The library's matmul with a weight in any layout, packed or plain. PyTorch's own operation for it
# only compiles with weights that are constants of the code.
OPERATION = torch.library.Library("s2d", "DEF")
OPERATION.define("packed_linear(Tensor x, Tensor weight) -> Tensor")
OPERATION.impl("packed_linear", lambda x, weight: x.new_empty((*x.shape[:-1], len(weight))), "Meta")


@cache
def teach_compiler():
    """Tell it what code to write for OPERATION."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    @register_lowering(torch.ops.s2d.packed_linear.default, type_promotion_kind=None)
    def lower(x, weight):
        return TensorBox.create(LinearUnary.create(x, weight, None, "none", [], ""))
