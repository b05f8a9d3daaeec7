"""One program in several processes, as torchrun starts them: what every rank needs."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import check_device


def from_rank_0(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What ``function()`` returns on rank 0, or in the one process; no other rank calls it.

    A user's mistake, or the end of the program, is raised on all ranks.
    """
    if not dist.is_initialized():
        return function()
    result = None
    error = None
    if dist.get_rank() == 0:
        try:
            result = function()
        except (ValueError, OSError, SystemExit) as raised:
            error = raised
    box = [result, error]
    dist.broadcast_object_list(box, group=group)
    result, error = box
    if error is not None:
        raise error
    return result


def own_device(name: str) -> torch.device:
    """The device of this one of torchrun's processes: the CPU, or a GPU that no other has."""
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"under torchrun each process has its own GPU: cuda, not {name!r}")
    if name != "cpu" and 0 < gpus < processes:
        raise ValueError(f"torchrun started {processes} processes, and there are {gpus} GPUs")
    device = check_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
