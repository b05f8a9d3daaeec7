"""Compiled code for a block and a head of a Llama: made once, kept on disk, for any context length.

Knows nothing about KV caches, padding or recording. A product of a few rows costs what reading the
weights costs, if each weight is read once for all rows. Libraries are made for many rows. So the
compiler is shown a sum a row, and fuses the sums into one loop over the weights. Where a processor
has instructions for products of bfloat16, the library is ahead if it is asked the other way round:
the weights times the few rows as columns.
"""

import os
import platform
import re
import time
from contextlib import contextmanager
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..model import Block, LlamaConfig, RMSNorm
from ..program import tell
from ..user_cache import private_folder

MOST_SUMS, MOST_HALF_SUMS = 8, 4  # rows; for more the library is ahead, earlier in half precision
HALF_PRODUCTS = torch.cpu._is_avx512_bf16_supported()  # instructions for products of bfloat16
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
def compiled_block(shape, rows, dtype):
    """``run_block`` for blocks of one ``shape``, so many rows, any number of slots in the cache."""
    new = partial(torch.zeros, dtype=dtype)
    block = Block(shape).to(dtype).requires_grad_(False)
    hidden, rope = new(1, rows, shape.hidden_size), new(2, rows, shape.head_dim).unbind()
    length = 8 * rows + 5  # any number but one that means something else here
    kv_shape = 1, length, shape.num_key_value_heads, shape.head_dim
    keys, values = (new(kv_shape).transpose(1, 2) for _ in range(2))
    mask = new(rows, length)
    for tensor, dim in ((keys, 2), (values, 2), (mask, 1)):
        torch._dynamo.mark_dynamic(tensor, dim)
    example = block, hidden, rope, mask, torch.arange(rows), keys, values
    what = f"a block of width {shape.hidden_size}, rows: {rows}"
    return compiled(run_block, example, what, (shape, dtype))


@cache
def compiled_head(shape, tokens, rows, dtype):
    """``run_head`` for a vocabulary of ``tokens`` and so many rows."""
    norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps).to(dtype).requires_grad_(False)
    head, hidden = (torch.zeros(n, shape.hidden_size, dtype=dtype) for n in (tokens, rows))
    what = f"a head of {tokens} tokens, rows: {rows}"
    return compiled(run_head, (norm, head, hidden), what, (shape, dtype))


def compiled(function, example, what, details):
    """``function``, compiled for arguments like those of ``example``, or found where it is kept.

    That is a folder of the user's, under ``what`` and ``details``. Calls check no shapes: callers
    keep to the example's.
    """
    folder = private_folder("compiled", key_of(machine()))
    names = Path(__file__).parents[1] / "model.py", Path(__file__)
    sources = [name.read_bytes() for name in names]
    file = folder / key_of((what, details, torch.get_num_threads(), sources))
    with kept_by_pytorch_in(folder):
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


def key_of(parts):
    return sha256(repr(parts).encode()).hexdigest()


def machine():
    """What compiled code depends on besides its source: the processor and PyTorch's version."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:  # not Linux
        first = ""
    kept = r"^(?:vendor_id|cpu family|model|stepping|flags|CPU |Features|isa).*$"
    processor = re.findall(kept, first, flags=re.MULTILINE) or platform.processor()
    capability = torch.backends.cpu.get_cpu_capability()
    return platform.node(), platform.machine(), processor, capability, torch.__version__


@contextmanager
def kept_by_pytorch_in(folder):
    """Have PyTorch compile by OPTIONS and keep it all in ``folder``, where only the user can write.

    Its own choice is the temporary directory, where another user may have been first.
    """
    from torch._inductor import config  # takes a second to import

    name = "TORCHINDUCTOR_CACHE_DIR"
    former = os.environ.get(name)
    mask = os.umask(0o077)
    os.environ[name] = str(folder)
    try:
        with config.patch(OPTIONS):
            yield
    finally:
        os.umask(mask)
        os.environ.pop(name)
        if former is not None:
            os.environ[name] = former


class Written:
    """The KV cache of a compiled block: keys and values (1, G, S+T, D), written at ``slots``."""

    def __init__(self, slots, keys, values):
        self.slots, self.keys, self.values = slots, keys, values

    def write(self, layer, keys, values):
        # Not index_copy_: compiled, that copies the whole cache onto itself.
        self.keys[:, :, self.slots] = keys
        self.values[:, :, self.slots] = values
        return self.keys, self.values


def run_block(block, hidden, rope, mask, slots, keys, values):
    """Hidden states (1, T, hidden) through one block."""
    if hidden.is_cuda:
        return block(hidden, rope, mask, Written(slots, keys, values), 0)
    with Streaming():
        return block(hidden, rope, mask, Written(slots, keys, values), 0)


def run_head(norm, head, hidden):
    """Hidden states (R, hidden) -> logits (R, V)."""
    with Streaming():
        return F.linear(norm(hidden), head)


class Streaming(TorchFunctionMode):
    """Shows the compiler sums in place of matrix products and attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            return product(*args[:2])
        if function is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        return function(*args, **(kwargs or {}))


def product(x, weight):
    """x (..., T, in) times ``weight`` (out, in) -> (..., T, out); as F.linear."""
    T = x.shape[-2]
    if T > 1 and HALF_PRODUCTS and x.dtype == torch.bfloat16:
        columns = x.reshape(-1, x.shape[-1]).t()  # (in, T)
        return (weight @ columns).t().reshape(*x.shape[:-1], -1)
    if T > (MOST_SUMS if x.dtype.itemsize > 2 else MOST_HALF_SUMS):
        return x @ weight.t()
    x = x.contiguous()
    x = x.as_strided(x.shape, x.stride())  # has the compiler store x once, not once a use
    sums = [(weight * row).sum(dim=-1) for row in x.flatten(0, -2)]
    return torch.stack(sums).view(*x.shape[:-1], -1)


def attention(q, k, v, attn_mask, enable_gqa=False):
    """As F.scaled_dot_product_attention, whose arguments they are; a mask (T, S) is given."""
    B, H, T, D = q.shape
    if T > 1:  # a group's heads together: libraries are as fast here, and sums compile slowly
        # Half precision is slower: for each new length the library makes code of its own.
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(wide).reshape(B, k.shape[1], -1, D) * D**-0.5
        scores = grouped @ k.to(wide).transpose(-1, -2)  # (B, G, H/G * T, S)
        scores = scores.view(B, k.shape[1], -1, T, k.shape[2]) + attn_mask
        return (scores.softmax(dim=-1).flatten(2, 3) @ v.to(wide)).view(B, H, T, D).to(q.dtype)
    q = q.reshape(B, k.shape[1], -1, 1, D) * D**-0.5  # (B, G, H/G, 1, D)
    scores = (q * k[:, :, None]).sum(dim=-1) + attn_mask  # (B, G, H/G, S)
    return (scores.softmax(dim=-1)[..., None] * v[:, :, None]).sum(dim=-2).view(B, H, T, D)
