"""Compiled code for a block and a head of a Llama: made once, kept on disk, for any context length.

Knows nothing about KV caches, padding or recording. A product of a few rows costs what reading the
weights costs, if each weight is read once for all rows. Libraries are made for many rows. So for
one row or two the compiler is shown a sum a row, and fuses the sums into one loop over the weights.
For more it calls the library, on weights that were laid out for it once (products.py) where that is
the quickest: compiled code takes these like any others.
"""

import os
import time
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..cache import KVCache
from ..model import Block, LlamaConfig, RMSNorm
from ..program import tell
from ..user_cache import key_of, machine, private_folder
from .products import PLAIN, join_block, products_of

FEW = 2  # rows for which sums are the quickest
MOST_SUMS = 8  # rows; for more the library is ahead, whichever way it is asked
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
    kept = {name: getattr(config, name) for name in (*names, "head_dim", "rms_norm_eps")}
    return LlamaConfig(vocab_size=1, num_hidden_layers=1, **kept)


@cache
def compiled_block(shape, rows, dtype, way):
    """``run_block`` for blocks of one ``shape``, so many rows, any number of slots in the cache."""
    new = partial(torch.zeros, dtype=dtype)
    block = Block(shape).to(dtype).requires_grad_(False)
    join_block(block, shape)
    for each in products_of(block):
        each.names = ["by_layout" if way == "by_layout" else "by_linear"] * len(PLAIN)
    hidden, rope = new(1, rows, shape.hidden_size), new(2, rows, shape.head_dim).unbind()
    length = 8 * rows + 5  # any number but one that means something else here
    kv_shape = 1, length, shape.num_key_value_heads, shape.head_dim
    keys, values = (new(kv_shape).transpose(1, 2) for _ in range(2))
    mask = new(rows, length)
    for tensor, dim in ((keys, 2), (values, 2), (mask, 1)):
        torch._dynamo.mark_dynamic(tensor, dim)
    example = way, block, hidden, rope, mask, torch.arange(rows), keys, values
    what = f"a block of width {shape.hidden_size}, rows: {rows}"
    return compiled(run_block, example, what, (shape, dtype, way))


@cache
def compiled_head(shape, tokens, rows, dtype, way):
    """``run_head`` for a vocabulary of ``tokens`` and so many rows."""
    norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps).to(dtype).requires_grad_(False)
    head, hidden = (torch.zeros(n, shape.hidden_size, dtype=dtype) for n in (tokens, rows))
    what = f"a head of {tokens} tokens, rows: {rows}"
    return compiled(run_head, (way, norm, head, hidden), what, (shape, dtype, way))


def compiled(function, example, what, details):
    """``function``, compiled for arguments like those of ``example``, or found where it is kept.

    That is a folder of the user's, under ``what`` and ``details``. Calls check no shapes: callers
    keep to the example's.
    """
    folder = private_folder("compiled", key_of(machine()))
    here = Path(__file__)
    front = (here.parents[1] / name for name in ("cache.py", "model.py"))
    names = *front, here.with_name("products.py"), here
    sources = [name.read_bytes() for name in names]
    file = folder / key_of((what, details, torch.get_num_threads(), sources))
    with compiler_for(folder):
        try:
            with file.open("rb") as opened:
                result = torch.compiler.load_compiled_function(opened)
        except Exception:  # not there, or damaged in any way: it is made again
            result = made(function, example, what, file)
    result.disable_guard_check()
    return result


def made(function, example, what, file):
    """``function``, compiled and written to ``file``; stderr says so, and how long it took."""
    began = time.monotonic()
    tell(f"compiling {what} ...", end=" ")
    try:
        compile = torch.compile(function, fullgraph=True, dynamic=False)
        result = compile.aot_compile((example, {}))
        result.save_compiled_function(file)
    except Exception as error:  # a compiler that does not work, a cache that cannot be written
        tell("")
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{what} could not be compiled ({reason}); is a C++ compiler there, g++ or the one "
            f"that CXX names, and does {file.parent} have space?"
        ) from None
    tell(f"{time.monotonic() - began:.1f} s")
    return result


@contextmanager
def compiler_for(folder):
    """Have PyTorch compile by OPTIONS and keep all in ``folder``, where only the user can write."""
    from torch._inductor import config, utils  # takes a second to import

    teach_compiler()
    mask = os.umask(0o077)
    try:  # in the temporary directory, PyTorch's choice, another user may have been first
        with utils._set_env("TORCHINDUCTOR_CACHE_DIR", str(folder)), config.patch(OPTIONS):
            yield
    finally:
        os.umask(mask)


# Compiled code calls the library for this operation, whatever layout the weight then has. PyTorch's
# own name of it is for weights that are constants of the code.
OPERATION = torch.library.Library("s2d", "DEF")
OPERATION.define("by_layout(Tensor x, Tensor weight) -> Tensor")
OPERATION.impl("by_layout", lambda x, weight: x.new_empty((*x.shape[:-1], len(weight))), "Meta")


@cache
def teach_compiler():
    """Tell it what code to write for OPERATION."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    @register_lowering(torch.ops.s2d.by_layout.default, type_promotion_kind=None)
    def lower(x, weight):
        return TensorBox.create(LinearUnary.create(x, weight, None, "none", [], ""))


class Written(KVCache):
    """That of a compiled block: keys and values (1, G, S+T, D), written at ``slots``."""

    def __init__(self, slots, keys, values):
        self.slots, self.keys, self.values = slots, keys, values

    def write(self, layer, keys, values):
        # Not index_copy_: compiled, that copies the whole cache onto itself.
        self.keys[:, :, self.slots] = keys
        self.values[:, :, self.slots] = values
        return self.keys, self.values


def run_block(way, block, hidden, rope, mask, slots, keys, values):
    """Hidden states (1, T, hidden) through one block."""
    if hidden.is_cuda:
        return block(hidden, rope, mask, Written(slots, keys, values), 0)
    with Streaming(way):
        return block(hidden, rope, mask, Written(slots, keys, values), 0)


def run_head(way, norm, head, hidden):
    with Streaming(way):
        return F.linear(norm(hidden), head)  # (R, hidden) -> (R, V)


class Streaming(TorchFunctionMode):
    """Shows the compiler what to do in place of matrix products and attention."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            return product(*args[:2], self.way)
        if function is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        return function(*args, **(kwargs or {}))


def way_of(rows, quickest):
    """How ``product`` multiplies so many rows; ``quickest``: of the ways of products.py."""
    if rows > FEW and quickest in ("by_layout", "from_left"):
        return quickest
    return "sums" if rows <= MOST_SUMS else "by_linear"


def product(x, weight, way):
    """x (..., T, in) times ``weight`` (out, in) -> (..., T, out); as F.linear."""
    if way == "by_layout":
        return torch.ops.s2d.by_layout(x, weight)
    if way == "from_left":
        columns = x.reshape(-1, x.shape[-1]).t()  # (in, T)
        return (weight @ columns).t().reshape(*x.shape[:-1], -1)
    if way == "by_linear":
        return x @ weight.t()
    x = x.contiguous()
    x = x.as_strided(x.shape, x.stride())  # has the compiler store x once, not once a use
    sums = [(weight * row).sum(dim=-1) for row in x.flatten(0, -2)]
    return torch.stack(sums).view(*x.shape[:-1], -1)


def attention(q, k, v, attn_mask, enable_gqa=False):
    """As F.scaled_dot_product_attention, whose arguments they are; a mask (T, S) is given."""
    B, H, T, D = q.shape
    if T > 1:  # a group's heads as queries: keys and values are read once
        queries, mask = q.reshape(B, k.shape[1], -1, D), attn_mask.repeat(H // k.shape[1], 1)
        return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask).view(B, H, T, D)
    q = q.reshape(B, k.shape[1], -1, 1, D) * D**-0.5  # (B, G, H/G, 1, D)
    scores = (q * k[:, :, None]).sum(dim=-1) + attn_mask  # (B, G, H/G, S)
    return (scores.softmax(dim=-1)[..., None] * v[:, :, None]).sum(dim=-2).view(B, H, T, D)
