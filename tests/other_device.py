"""A device that is not the CPU, in Python: its tensors wrap CPU tensors, and do not mix with them.

It stands in for a GPU in tests: an operation on tensors of two devices raises, as it would there,
and copies for which the CPU would have to wait for a GPU are counted: to the CPU, and to the device
unless they are ``non_blocking``. It does not show what kernels compute, in which precision, how
much memory there is, and whether ``torch.inference_mode`` is used rightly: wrapped tensors do not
go with it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
WAITS = {  # operations whose result is a number for Python
    "aten._local_scalar_dense.default",
    "aten.is_nonzero.default",
    "aten.nonzero.default",
    "aten.equal.default",
}
COPIES = {"aten._to_copy.default": 0, "aten.copy_.default": 1}  # which argument is copied
waits: list[int] = []  # how many numbers the CPU waited for


class Pretend(torch.Tensor):
    """A tensor on the device; ``raw`` is the CPU tensor that computes for it."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Pretend":
        layout = dict(strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype)
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, device=f"{NAME}:0", **layout)
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        return run(operation, arguments, options or {})

    def tolist(self) -> list:
        waits.append(self.numel())
        return self.raw.tolist()


def raw(x: Any) -> Any:
    return x.raw if isinstance(x, Pretend) else x


def run(operation: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """Compute an operation on the CPU, if all of its tensors are on one device."""
    name = str(operation)
    tensors: list[Tensor] = []

    def unwrapped(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
        return raw(x)

    plain, plain_options = tree_map(unwrapped, (tuple(arguments), options))
    asked = options.get("device")
    here = asked is None or torch.device(asked).type == NAME
    if name in WAITS:
        waits.append(1)
    if name in COPIES:
        source = arguments[COPIES[name]]
        target_here = isinstance(arguments[0], Pretend) if asked is None else here
        no_wait = target_here and (options.get("non_blocking") or arguments[2:] == (True,))
        if isinstance(source, Pretend) != target_here and not no_wait:
            waits.append(source.numel())
    else:
        on_cpu = [x for x in tensors if not isinstance(x, Pretend) and x.dim() > 0]
        if on_cpu and any(isinstance(x, Pretend) for x in tensors):
            raise RuntimeError(f"{name}: tensors on two devices")
    if asked is not None:
        plain_options["device"] = "cpu"
    result = operation(*plain, **plain_options)
    if name == "aten.copy_.default":
        return arguments[0]
    given = {id(raw(x)): x for x in tensors}  # in-place operations return what they were given
    wraps = here and (asked is not None or any(isinstance(x, Pretend) for x in tensors))

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return given.get(id(x), Pretend(x) if wraps else x)

    return tree_map(wrapped, result)


def empty_strided(size, stride, dtype=None, **_):
    return Pretend(torch.empty_strided(size, stride, dtype=dtype))


def empty(size, dtype=None, **_):
    return Pretend(torch.empty(size, dtype=dtype))


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, Pretend) or not non_blocking:
        waits.append(source.numel())
    raw(target).copy_(raw(source))
    return target


def register() -> list[torch.library.Library]:
    """Make the device known to PyTorch, for the rest of this process; keep what is returned."""
    _setup_privateuseone_for_python_backend(NAME)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")

    def fall_back(operation, *arguments, **options):
        return run(operation, arguments, options)

    everything.fallback(fall_back, "PrivateUse1")
    aten.impl("empty_strided", empty_strided, "PrivateUse1")
    aten.impl("empty.memory_format", empty, "PrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    torch.inference_mode = torch.no_grad  # with which wrapped tensors do not go
    return [everything, aten]
