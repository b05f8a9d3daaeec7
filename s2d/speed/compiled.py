"""Compiled code for a block and the head of a Llama: made once, kept, for any context length.

A matmul of a few rows takes as long as reading the weights, if each is read once for all rows; but
libraries are made for many rows. So for a few rows the compiler is shown a sum per row, and fuses
the sums into one loop over the weights. For more it calls the library.
"""

from functools import partial
from pathlib import Path

import torch
from torch._inductor import config, utils
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.mkldnn_ir import LinearUnary

from ..cache import KVCache
from ..notices import tell
from ..timing import cache_folder, key_of
from . import is_large
from .linear import can_pack, fast_linears

FEW_SUMS = 2  # rows for which sums are always the fastest
MOST_SUMS = 8  # rows; for more the library is ahead, whichever way it is asked
SOURCES = "model.py", "cache.py", "speed/linear.py", "speed/compiled.py"  # of what is compiled
OPTIONS = {  # of the compiler; flags are in the names of what it makes, so finding needs them too
    "max_fusion_size": MOST_SUMS,  # more sums in one loop would not fit the registers
    "cpp_wrapper": True,  # one call into compiled code, not one for each of its loops
    "cpp.enable_floating_point_contract_flag": "fast",  # one instruction multiplies and adds
    "size_asserts": False,
    "cpp_cache_precompile_headers": False,  # they would lie in the temporary directory
}


class Slots(KVCache):
    """The KV cache of a compiled block: keys and values (1, G, S+T, D), written at ``slots``."""

    def __init__(self, slots, keys, values):
        self.slots, self.keys, self.values = slots, keys, values

    def update(self, layer, k, v):
        # Not index_copy_: compiled, that copies the whole cache onto itself.
        self.keys[:, :, self.slots] = k
        self.values[:, :, self.slots] = v
        return self.keys, self.values


def run_block(block, hidden, cos, sin, mask, slots, keys, values):
    """Hidden states (1, T, hidden) through one block."""
    return block(hidden, (cos, sin), mask, Slots(slots, keys, values), 0)


def run_head(norm, head, hidden):
    return head(norm(hidden))  # (R, hidden) -> (R, V)


def use_compiled(model, rows):
    """Tell the FastLinears of ``model`` their kernel for ``rows``; returns its name."""
    library = "packed" if is_large(model) and can_pack(model.dtype) else "plain"
    summed = rows <= FEW_SUMS or (rows <= MOST_SUMS and library == "plain")
    for linear in fast_linears(model):
        linear.sums = rows if summed else 0
    return "sums" if summed else library


def compiled_passes(model, rows):
    """``run_block`` and ``run_head`` for so many rows, all blocks of ``model``, and any length.

    The linear layers of ``model`` are FastLinears, which keep the kernel of these passes.
    """
    block, head_dim = model.model.layers[0], model.config.head_dim
    new = partial(torch.zeros, dtype=model.dtype)
    kernel = use_compiled(model, rows)
    shapes = [weight.shape for weight in (*block.parameters(), model.lm_head.weight)]
    key = [shapes, head_dim, model.config.rms_norm_eps, model.dtype, kernel]
    length = 8 * rows + 5  # any number but one that means something else here
    kv_shape = 1, length, model.config.num_key_value_heads, head_dim
    keys, values = (new(kv_shape).transpose(1, 2) for _ in range(2))
    mask = new(rows, length)
    for tensor, dim in ((keys, 2), (values, 2), (mask, 1)):
        torch._dynamo.mark_dynamic(tensor, dim)
    hidden, (cos, sin) = new(1, rows, model.config.hidden_size), new(2, rows, head_dim).unbind()
    example = block, hidden, cos, sin, mask, torch.arange(rows), keys, values
    run = compiled(run_block, example, f"a block, {rows} rows", key)
    example = model.model.norm, model.lm_head, hidden[0]
    return run, compiled(run_head, example, f"a head, {rows} rows", key)


def compiled(function, example, what, key):
    """``function``, compiled for arguments like those of ``example``, or found.

    It is kept in the cache directory, under ``what`` and ``key``. Calls check no shapes or other
    conditions: callers keep to the example's.
    """
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
    compiler = torch.compile(function, fullgraph=True, dynamic=False)
    if not hasattr(compiler, "aot_compile"):
        raise ValueError(f"--compile needs PyTorch 2.13 or newer; this is {torch.__version__}")
    tell(f"compiling {what}")
    try:
        result = compiler.aot_compile((example, {}))
        file.parent.mkdir(parents=True, exist_ok=True)
        result.save_compiled_function(file)
    except Exception as error:  # a compiler that does not work, a folder that cannot be written
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--compile failed (it needs a C++ compiler, such as g++): {reason}"
        ) from None
    return result


# The library's matmul with a weight in any layout, packed or plain. PyTorch's own operation for it
# only compiles with weights that are constants of the code.
OPERATION = torch.library.Library("s2d", "DEF")
OPERATION.define("packed_linear(Tensor x, Tensor weight) -> Tensor")
OPERATION.impl("packed_linear", lambda x, weight: x.new_empty((*x.shape[:-1], len(weight))), "Meta")


@register_lowering(torch.ops.s2d.packed_linear.default, type_promotion_kind=None)
def lower(x, weight):
    """The code that the compiler writes for OPERATION."""
    return TensorBox.create(LinearUnary.create(x, weight, None, "none", [], ""))
