"""Copies from the CPU to another device."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A list, an array or a CPU tensor as a tensor on ``device``.

    The CPU does not wait. A GPU copies from pinned memory when it gets there; before a copy from
    other memory the CPU would wait until the GPU has done all that it was given so far.
    """
    device = torch.device(device)
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    # On Apple's GPUs a copy that nobody waits for may read memory that was freed since.
    return tensor.to(device, non_blocking=device.type != "mps")
