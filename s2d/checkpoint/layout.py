"""Weights laid out in memory such that a CPU multiplies a few rows by them faster.

A pass over a few tokens reads every weight once, and takes as long as that if the kernel is right.
Which layout has the right kernel is a rule, and nothing is timed: a small model in float32 is laid
out by columns, and stays an ordinary model; other weights are packed for oneDNN where the processor
has the instructions for their dtype; else they stay plain.

In this project only this file uses private parts of PyTorch: ``torch.ops.mkldnn`` packs weights
for oneDNN's matmul, for which there is no public name. Where it is missing, nothing is packed.
``_apply`` is what moves and casts a module.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

PACKED_FOR = 8  # rows; the layout for these is as good for 1 to 16
SMALL = 100e6  # bytes of weights


def refuse(*_: Any) -> NoReturn:
    words = "packed weights are for inference alone, so load the model again with"
    raise ValueError(f"{words} load_model(..., quick=False)") from None


class PackedLinear(nn.Module):
    """An nn.Linear for inference alone: the parameter itself is in oneDNN's own layout.

    To move, cast, copy, load, save or train it raises ValueError.
    """

    __reduce_ex__ = refuse  # asked for by copy.deepcopy and pickle

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(pack(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.register_state_dict_pre_hook(refuse)
        self.register_load_state_dict_pre_hook(refuse)

    def _apply(self, *arguments: Any) -> "PackedLinear":
        """The part of ``to``, ``half``, ``float`` and so on, which may change nothing."""
        try:
            return super()._apply(*arguments)
        except RuntimeError:
            refuse()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad or self.weight.requires_grad:
            refuse()
        return multiply_packed(x, self.weight, self.bias)


def pack(weight: Tensor) -> Tensor:
    """A copy of ``weight`` (out, in) in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for a packed ``weight``."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def quicken(model: nn.Module) -> str:
    """Lay out the weights of ``model``, which is on a CPU, anew; returns the layout's name."""
    # By their names, which hold no weights: so each is freed when it has been copied.
    linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    size = sum(model.get_submodule(name).weight.nbytes for name in linears)
    if model.dtype == torch.float32 and size < SMALL:
        for name in linears:  # the entries of a column come to lie together in memory
            weight = model.get_submodule(name).weight
            weight.data = weight.data.t().contiguous().t()
        return "columns"
    if not can_pack(model.dtype):
        return "plain"
    for name in linears:
        model.set_submodule(name, PackedLinear(model.get_submodule(name)))
    return "packed"


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor and this PyTorch can pack weights of a ``dtype``."""
    try:
        weight = pack(torch.ones(32, 32, dtype=dtype, device="cpu"))
        multiply_packed(torch.ones(2, 32, dtype=dtype, device="cpu"), weight)
    except (RuntimeError, AttributeError):  # no such instructions; no such operation
        return False
    return True
