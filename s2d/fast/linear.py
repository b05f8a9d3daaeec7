"""Linear layers of a Llama that are faster for a few rows.

A pass over a few tokens reads every weight once and takes as long as that, with the right kernel.
For one row it differs by processor and dtype, by up to two times, so it is timed once (costs.py).
For several rows it is oneDNN's, with weights that were packed for it once. Matmuls with the same
input are joined: queries, keys and values; gate and up.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..cache import attend
from ..model import MLP, Attention, rotate
from . import DTYPES
from .costs import fastest_calls, timed_once

PACKED_FOR = 8  # rows; the layout for these is as good for 1 to 16
TIMED_BYTES = 48e6  # of weights that kernels are timed with: more than caches hold


def transposed(x, weight):
    """The weight (out, in) times the row (1, 1, in) as two equal columns."""
    columns = x.view(1, -1).expand(2, -1).t()  # (in, 2)
    return (weight @ columns)[:, 0].contiguous().view(1, 1, -1)


def native(x, weight):
    """PyTorch's own kernel instead of oneDNN's."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight)
    finally:
        torch._C._set_mkldnn_enabled(before)


ONE_ROW = {"linear": F.linear, "transposed": transposed, "native": native}


def packed_linear(x, weight):
    """F.linear for a weight that may be packed."""
    if torch.compiler.is_compiling():
        return torch.ops.s2d.packed_linear(x, weight)  # compiled.py
    if not weight.is_mkldnn:
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def pack(weight):
    """A copy of ``weight`` (out, in) in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


def can_pack(dtype):
    """Whether this processor and this PyTorch have packed matmuls in ``dtype``."""
    try:
        packed_linear(torch.ones(2, 32, dtype=dtype), pack(torch.ones(32, 32, dtype=dtype)))
    except (RuntimeError, AttributeError):  # no such instructions; no such operation
        return False
    return True


class FastLinear(nn.Module):
    """An nn.Linear without bias: ``few_kernel`` up to ``few`` rows, above ``packed_linear``."""

    def __init__(self, weight):
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:  # a concatenation of parameters
            self.register_buffer("weight", weight, persistent=False)
        self.packed = weight.detach()  # until lay_out
        self.few, self.few_kernel = 1, F.linear

    def forward(self, x):
        if x.requires_grad or self.weight.requires_grad:
            return F.linear(x, self.weight)
        if x.numel() <= self.few * x.size(-1):
            return self.few_kernel(x, self.weight)
        return packed_linear(x, self.packed)


class Joined(FastLinear):
    """Linear layers with one input as one matmul; their weights become parts of its own."""

    def __init__(self, *linears):
        super().__init__(torch.cat([linear.weight.detach() for linear in linears]))
        self.linears = linears
        self.sizes = [len(linear.weight) for linear in linears]
        for linear, part in zip(linears, self.weight.split(self.sizes)):
            linear.weight = nn.Parameter(part, requires_grad=False)

    def forward(self, x):
        if any(linear.weight.requires_grad for linear in self.linears):
            return [linear(x) for linear in self.linears]
        return super().forward(x).split(self.sizes, dim=-1)


class JoinedAttention(Attention):
    """An Attention whose queries, keys and values are one matmul."""

    def __init__(self, attention):
        nn.Module.__init__(self)
        self.head_dim = attention.head_dim
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, FastLinear(attention.o_proj.weight)
        self.joined = Joined(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x, rope, mask, cache, layer):
        B, T, _ = x.shape
        parts = [part.view(B, T, -1, self.head_dim) for part in self.joined(x)]
        q, k, v = (part.transpose(1, 2) for part in parts)  # (B, H or G, T, D)
        cos, sin = rope
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is None:
            attended = attend(q, k, v, mask)
        else:
            attended = cache.attend(layer, q, k, v, mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class JoinedMLP(MLP):
    """An MLP whose gate and up are one matmul."""

    def __init__(self, mlp):
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj
        self.down_proj = FastLinear(mlp.down_proj.weight)
        self.joined = Joined(self.gate_proj, self.up_proj)

    def forward(self, x):
        gate, up = self.joined(x)
        return self.down_proj(F.silu(gate) * up)


def join(block):
    """Replace the attention and the MLP of a Block by their joined forms."""
    block.self_attn = JoinedAttention(block.self_attn)
    block.mlp = JoinedMLP(block.mlp)


def fast_linears(module):
    return [each for each in module.modules() if isinstance(each, FastLinear)]


def use_fastest(model):
    """Join the matmuls of ``model``, and choose the fastest kernel for one row."""
    for block in model.model["layers"]:
        join(block)
    linears = fast_linears(model)
    model.lm_head = FastLinear(model.lm_head.weight)
    if model.dtype in DTYPES:
        what = ["one row", [linear.weight.shape for linear in linears[:4]], model.dtype]
        seconds = timed_once(what, lambda: time_one_row(linears))
        for linear in fast_linears(model):
            linear.few_kernel = ONE_ROW[min(ONE_ROW, key=seconds.get)]


@torch.inference_mode()
def time_one_row(linears):
    """{name in ONE_ROW: seconds} of matmuls with the weights of ``linears``, one after another."""
    blocks = -(-int(TIMED_BYTES) // sum(linear.weight.nbytes for linear in linears[:4]))
    weights = [linear.weight for linear in linears[: 4 * blocks]]
    rows = [weight.new_ones(1, 1, weight.shape[1]) for weight in weights]

    def multiply(name):
        for x, weight in zip(rows, weights):
            ONE_ROW[name](x, weight)

    return dict(zip(ONE_ROW, fastest_calls(multiply, list(ONE_ROW))))


def lay_out(model):
    """Pack the weights of ``model`` for passes of several rows: one more copy of them.

    Nothing happens where ``model`` is not quickened, or packed already, or packing is not possible.
    """
    linears = [each for each in fast_linears(model) if not each.packed.is_mkldnn]
    if linears and can_pack(model.dtype):
        for linear in linears:
            linear.packed = pack(linear.weight.detach())
