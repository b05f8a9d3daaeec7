"""Weights of a model laid out in memory such that a CPU multiplies a few rows by them faster.

A pass over a few tokens reads every weight once, and takes as long as that if the kernel is right.
Which layout has the right kernel differs by processor, dtype and size, by up to two times. A small
model in float32 is laid out by columns, which was the fastest on the processors that were tried
(AVX2, AVX-512, AMX), and stays an ordinary model. For the others the layouts are timed, once on
each machine, for the rows that decoding uses; one that is slower than plain weights for any of
them, or hardly faster on average, is not taken.

In this project only this file uses private parts of PyTorch: ``torch.ops.mkldnn`` packs weights
for oneDNN's matmul, for which there is no public name. Where it is missing, nothing is packed.
"""

from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..timing import time_calls, timed_once

ROWS = 1, 2, 4, 8, 16  # of the matmuls that are timed
PACKED_FOR = 8  # rows; the layout for these is as good for 1 to 16
SMALL = 100e6  # bytes of weights; so many are timed
SLOWER = 1.05  # what may be noise: so many times as long as with plain weights
WORTH = 0.9  # what is no noise: a layout takes at most so much of the time on average


class PackedLinear(nn.Module):
    """An nn.Linear for inference alone: the parameter itself is in oneDNN's own layout.

    PyTorch refuses to move, cast, copy or load such a parameter. To save or to train it raises
    ValueError.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(pack(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.register_state_dict_pre_hook(refuse)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad or self.weight.requires_grad:
            refuse()
        return multiply_packed(x, self.weight, self.bias)


def refuse(*_: Any) -> NoReturn:
    raise ValueError("packed weights are for inference alone: load_model(..., quick=False)")


def pack(weight: Tensor) -> Tensor:
    """A copy of ``weight`` (out, in) in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for a packed ``weight``."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def by_columns(weight: Tensor) -> Tensor:
    """The same ``weight`` (out, in), but the entries of a column lie together in memory."""
    return weight.t().contiguous().t()


LAYOUTS = {  # name: what lays a weight out, and what multiplies rows by it
    "plain": (lambda weight: weight, F.linear),
    "columns": (by_columns, F.linear),
    "packed": (pack, multiply_packed),
}


def quicken(model: nn.Module) -> str:
    """Lay out the weights of ``model``, which is on a CPU, anew; returns the layout's name."""
    name = layout_for(linear_weights(model), usable_layouts(model.dtype))
    # Nothing may hold the plain weights meanwhile, so that each is freed when it has been copied.
    parents = [module for module in model.modules() if not isinstance(module, nn.Linear)]
    for parent in parents:
        for child, linear in list(parent.named_children()):
            if isinstance(linear, nn.Linear):
                lay_out(parent, child, linear, name)
    return name


def layout_for(weights: list[Tensor], names: list[str]) -> str:
    """Which of the layouts ``names`` the ``weights`` of a model get."""
    if "columns" in names and sum(weight.nbytes for weight in weights) < SMALL:
        return "columns"
    return choose_layout(weights, names)


def lay_out(parent: nn.Module, child: str, linear: nn.Linear, name: str) -> None:
    """Give ``linear``, the ``child`` of ``parent``, the layout ``name``."""
    if name == "columns":
        linear.weight.data = by_columns(linear.weight.data)
    elif name == "packed":
        setattr(parent, child, PackedLinear(linear))


def linear_weights(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def choose_layout(weights: list[Tensor], names: list[str]) -> str:
    """That of the layouts ``names`` that is the fastest on average, and nowhere slower than plain.

    "plain" is among them, and is taken unless another one is worth it.
    """
    if len(names) == 1:
        return names[0]
    sizes = accumulate((weight.nbytes for weight in weights), initial=0)
    timed = [weight for weight, before in zip(weights, sizes) if before < SMALL]
    what = ["layouts", timed[0].dtype, [tuple(weight.shape) for weight in timed]]
    cases = [(name, rows) for name in names for rows in ROWS]
    seconds = timed_once(what, cases, lambda: time_layouts(timed, cases))
    ratios = {  # what a matmul costs, if it costs 1 with plain weights
        name: [seconds[name, rows] / seconds["plain", rows] for rows in ROWS] for name in names
    }
    worth = {}
    for name, each in ratios.items():
        mean = sum(each) / len(each)
        if max(each) <= SLOWER and mean <= WORTH:
            worth[name] = mean
    return min(worth, key=worth.get, default="plain")


def usable_layouts(dtype: torch.dtype) -> list[str]:
    """The names of LAYOUTS that may be faster in ``dtype`` with this processor and this PyTorch."""
    names = ["plain"]
    if dtype.itemsize >= 4:  # for half precision there is no kernel that reads columns
        names.append("columns")
    try:
        weight = pack(torch.ones(32, 32, dtype=dtype, device="cpu"))
        multiply_packed(torch.ones(2, 32, dtype=dtype, device="cpu"), weight)
    except (RuntimeError, AttributeError):  # no such instructions; no such operation
        return names
    return [*names, "packed"]


@torch.inference_mode()
def time_layouts(weights: list[Tensor], cases: list[tuple[str, int]]) -> list[list[float]]:
    """Seconds of matmuls with all ``weights``, for each case: a layout's name, and the rows."""
    laid_out = {}
    for name in {name for name, _ in cases}:
        convert, _ = LAYOUTS[name]
        laid_out[name] = [convert(weight) for weight in weights]

    def multiply(case: tuple[str, int]) -> None:
        name, rows = case
        _, kernel = LAYOUTS[name]
        for weight, plain in zip(laid_out[name], weights):
            kernel(plain.new_ones(1, rows, plain.shape[1]), weight)

    return time_calls(multiply, cases)
