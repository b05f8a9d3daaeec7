"""Linear layers of a Llama that are faster for a few rows.

A pass over a few tokens reads every weight once and takes as long as that, with the right kernel.
For one row it differs by processor and dtype, by up to two times, so it is timed once (costs.py).
For several rows it is oneDNN's, with weights that were packed for it once.
"""

from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from .costs import fastest_calls, timed_once

PACKED_FOR = 8  # rows; the layout for these is as good for 1 to 16
PACK_AT = 32  # rows; more are a prompt, and plain decoding needs no packed weights
TIMED_BYTES = 48e6  # of weights that kernels are timed with: more than caches hold


def transposed(x, weight):
    """The weight (out, in) times the row (..., in) as two equal columns."""
    row = x.reshape(1, -1)
    columns = torch.cat((row, row)).t()  # (in, 2), in memory of its own
    return (weight @ columns)[:, 0].contiguous().view(*x.shape[:-1], -1)


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


@cache
def can_pack(dtype):
    """Whether this processor and this PyTorch have packed matmuls in ``dtype``."""
    try:
        packed_linear(torch.ones(2, 32, dtype=dtype), pack(torch.ones(32, 32, dtype=dtype)))
    except (RuntimeError, AttributeError):  # no such instructions; no such operation
        return False
    return True


class FastLinear(nn.Module):
    """An nn.Linear without bias that is fast for a few rows.

    Up to ``few`` rows it uses ``few_kernel``. The first time it meets more than that, but not as
    many as a prompt has, it packs its weight.
    """

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.packed = weight.detach()
        self.can_pack = can_pack(weight.dtype)
        self.few, self.few_kernel = 1, F.linear

    def forward(self, x):
        rows = x.numel() // x.size(-1)
        if rows <= self.few:
            return self.few_kernel(x, self.weight)
        if rows <= PACK_AT and self.can_pack:
            self.pack()
        return packed_linear(x, self.packed)

    def pack(self):
        self.packed = pack(self.weight.detach())
        self.can_pack = False


def replace_linears(module):
    """Replace each nn.Linear in ``module`` by a FastLinear with its weight."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, FastLinear(layer.weight))


def fast_linears(module):
    return [each for each in module.modules() if isinstance(each, FastLinear)]


def use_fastest(model):
    """Replace the linear layers of ``model``, and choose the fastest kernel for one row."""
    replace_linears(model)
    weights = [linear.weight for linear in fast_linears(model.model.layers)]
    what = ["one row", model.dtype, [weight.shape for weight in weights[:7]]]  # of one block
    seconds = timed_once(what, lambda: time_one_row(weights))
    for linear in fast_linears(model):
        linear.few, linear.few_kernel = 1, ONE_ROW[min(ONE_ROW, key=seconds.get)]


@torch.inference_mode()
def time_one_row(weights):
    """{name in ONE_ROW: seconds} of matmuls with TIMED_BYTES of ``weights``, one after another."""
    before = accumulate((weight.nbytes for weight in weights), initial=0)
    weights = [weight for weight, size in zip(weights, before) if size < TIMED_BYTES]
    rows = [weight.new_ones(1, 1, weight.shape[1]) for weight in weights]

    def multiply(name):
        for x, weight in zip(rows, weights):
            ONE_ROW[name](x, weight)

    return dict(zip(ONE_ROW, fastest_calls(multiply, list(ONE_ROW))))
