"""One program in several processes, the ranks, as torchrun starts them: what every rank needs.

The default process group is for objects. It is gloo's, and waits for a day, since rank 0 may
wait for a person. Sums have a group of their own (``new_sums_group``).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import check_device


def is_rank_0() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_0(function: Callable[[], Any]) -> Any:
    """What ``function()`` returns on rank 0, or in the only process; no other rank calls it.

    Where it raises an error, rank 0 fails, and so ends all ranks (cli/torchrun.py).
    """
    box = [function() if is_rank_0() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def each_from_rank_0(items: Iterable[Any]) -> Iterator[Any]:
    """The ``items`` of rank 0, none of which is None; no other rank iterates over its own."""
    iterator = iter(items)
    while (item := from_rank_0(lambda: next(iterator, None))) is not None:
        yield item


def new_sums_group(device: torch.device) -> dist.ProcessGroup:
    """A process group for tensors on ``device``. How long it waits is PyTorch's own default."""
    return dist.new_group(backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


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
