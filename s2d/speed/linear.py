"""Linear layers of a Llama that are faster for a few rows.

A pass over a few tokens reads every weight once and takes as long as that, with the right kernel.
For several rows it is oneDNN's, with weights that were packed for it. For one row it differs by
processor and dtype, by up to two times, so it is timed once (costs.py).
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..timing import time_calls, timed_once

PACKED_FOR = 8  # rows; the layout for these is as good for 1 to 16
FEW = 32  # rows; more are a prompt
SPARE = 0.05  # the part of the free memory that plain weights may take next to packed ones
TIMED_BYTES = 48e6  # of weights that kernels are timed with: more than caches hold


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    """The weight (out, in) times the row (..., in) as two equal columns."""
    row = x.reshape(1, -1)
    columns = torch.cat((row, row)).t()  # (in, 2), in memory of its own
    return (weight @ columns)[:, 0].contiguous().view(*x.shape[:-1], -1)


def native(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own kernel instead of oneDNN's."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight)
    finally:
        torch._C._set_mkldnn_enabled(before)


ONE_ROW = {"linear": F.linear, "transposed": transposed, "native": native}


def packed_linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear for a weight that may be packed."""
    if torch.compiler.is_compiling():
        return torch.ops.s2d.packed_linear(x, weight)  # compiled.py
    if not weight.is_mkldnn:
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A copy of ``weight`` (out, in) in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor and this PyTorch have packed matmuls in ``dtype``."""
    try:
        rows = torch.ones(2, 32, dtype=dtype, device="cpu")
        packed_linear(rows, pack(torch.ones(32, 32, dtype=dtype, device="cpu")))
    except (RuntimeError, AttributeError):  # no such instructions; no such operation
        return False
    return True


class FastLinear(nn.Module):
    """An nn.Linear without bias that is fast for a few rows.

    It packs its weight when it meets a few rows for the second time: the first time may be a short
    prompt, and plain decoding, of one row, needs no packed weight. The packed weight takes the
    place of the plain one, unless ``keep_plain`` says that one row is faster with that. Whatever
    saves, loads, moves, casts or copies the layer has it unpacked first. Only changes that PyTorch
    does not count, as those by way of ``.data``, are not noticed.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight  # (out, in), or None while there is only a packed one
        self.one_row: Callable = F.linear  # kernel for one row of the plain weight
        self.keep_plain = True
        self.sums = 0  # rows that compiled code sums by itself, see compiled.py
        self.unpack()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.size(-1)
        if torch.compiler.is_compiling():
            return self.compiled(x, rows)
        plain = self._parameters["weight"]  # found sooner than self.weight
        if self.is_packed:
            if plain is not None and self.has_changed(plain):
                self.unpack()
        elif self.may_pack and 1 < rows <= FEW and not plain.requires_grad:
            self.passes += 1
            if self.passes == 2:
                self.pack()
        if rows == 1 and plain is not None:
            return self.one_row(x, plain)
        if not self.is_packed:
            return F.linear(x, plain)
        if x.requires_grad:
            raise RuntimeError("packed weights have no gradients; load_model(..., quick=False)")
        return packed_linear(x, self.packed)

    def compiled(self, x: Tensor, rows: int) -> Tensor:
        return sums(x, self.weight) if rows <= self.sums else packed_linear(x, self.packed)

    def pack(self) -> None:
        version = version_of(self.weight)
        self.packed = pack(self.weight.detach())
        self.is_packed = True
        if not self.keep_plain:
            self.weight = None
        self.packed_from = self.weight, version

    def has_changed(self, plain: nn.Parameter) -> bool:
        """Whether the weight was replaced, changed in place, or is to be trained, since packed."""
        source, version = self.packed_from
        return plain is not source or version_of(plain) != version or plain.requires_grad

    def unpack(self) -> None:
        """Have the plain weight alone, until it is packed again."""
        if self.weight is None:
            self.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        self.packed = self.weight.detach()
        self.is_packed = False
        self.may_pack = self.weight.is_cpu and can_pack(self.weight.dtype)
        self.passes = 0  # over a few rows

    def _apply(self, *args: Any) -> nn.Module:  # to, cuda, bfloat16, ...
        self.unpack()
        super()._apply(*args)
        self.unpack()
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        self.unpack()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.unpack()
        super()._load_from_state_dict(*args)
        self.unpack()

    def __getstate__(self) -> dict[str, Any]:  # of a copy, or of torch.save
        self.unpack()
        return self.__dict__


def version_of(weight: Tensor) -> int:
    """A number that grows whenever the weight is changed in place."""
    return 0 if weight.is_inference() else weight._version


def sums(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear with one sum per row, which the compiler fuses into one loop over the weights."""
    x = x.contiguous()
    x = x.as_strided(x.shape, x.stride())  # has the compiler store x once, not once per use
    each = [(weight * row).sum(dim=-1) for row in x.flatten(0, -2)]
    return torch.stack(each).view(*x.shape[:-1], -1)


def replace_linears(module: nn.Module) -> None:
    """Replace each nn.Linear in ``module`` by a FastLinear with its weight."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, FastLinear(layer.weight))


def fast_linears(module: nn.Module) -> list[FastLinear]:
    return [each for each in module.modules() if isinstance(each, FastLinear)]


def use_fastest(model: nn.Module) -> None:
    """Replace the linear layers of ``model``, and choose the fastest kernel for one row.

    Memory of both plain and packed weights is taken only if one row is faster with the plain ones,
    and if the plain ones take no more than SPARE of the memory that is free.
    """
    replace_linears(model)
    linears = fast_linears(model)
    weights = [linear.weight for linear in fast_linears(model.model.layers)]
    what = ["one row, plain and packed", model.dtype, [each.shape for each in weights[:7]]]
    ways = [*ONE_ROW, "packed"] if can_pack(model.dtype) else [*ONE_ROW]
    seconds = timed_once(what, ways, lambda: time_one_row(weights, ways))
    fastest = min(ONE_ROW, key=lambda name: seconds[name])
    slower = seconds.get("packed", 0.0) > 1.05 * seconds[fastest]
    fits = sum(linear.weight.nbytes for linear in linears) < SPARE * free_memory()
    for linear in linears:
        linear.one_row = ONE_ROW[fastest]
        tied = linear.weight is model.model.embed_tokens.weight  # which keeps it in any case
        linear.keep_plain = tied or (slower and fits)


def free_memory() -> float:
    """Bytes that programs may still take."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
    return math.inf  # not known here


@torch.inference_mode()
def time_one_row(weights: list[Tensor], ways: list[str]) -> list[list[float]]:
    """Seconds of matmuls with TIMED_BYTES of ``weights``, one after another, for each of ``ways``:
    kernels of ONE_ROW, and "packed".
    """
    before = accumulate((weight.nbytes for weight in weights), initial=0)
    weights = [weight for weight, size in zip(weights, before) if size < TIMED_BYTES]
    rows = [weight.new_ones(1, 1, weight.shape[1]) for weight in weights]
    kernels = ONE_ROW | {"packed": packed_linear}
    packed = [pack(weight) for weight in weights] if "packed" in ways else []

    def multiply(name: str) -> None:
        kernel = kernels[name]
        for x, weight in zip(rows, packed if name == "packed" else weights):
            kernel(x, weight)

    return time_calls(multiply, ways)
