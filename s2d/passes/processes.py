"""Programs that torchrun starts several times: how they begin, share what is read, and end."""

import atexit
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..checkpoint.load import check_device

A_PERSON = timedelta(days=1)  # how long ranks wait for what somebody types on rank 0
AT_EXIT = timedelta(seconds=20)  # how long a rank waits at its end for the others


def join_processes() -> None:
    """Join the processes that torchrun started, if it did; rank 0 alone prints."""
    if not dist.is_torchelastic_launched():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=A_PERSON)
    atexit.register(leave_processes, store, sys.stderr)
    if rank > 0:
        sys.stdout = open(os.devnull, "w")
        sys.stderr = StringIO()


def leave_processes(store: dist.Store, stderr: TextIO) -> None:
    """At the end of a rank, wait for the others, as torchrun ends them all when one has failed.

    So rank 0 has the time to say what all ranks find wrong. If a rank fails alone, the others wait
    for its part of a sum. Then it says here what is wrong.
    """
    rank = dist.get_rank()
    store.set(f"{rank} has ended", "")
    try:
        store.wait([f"{other} has ended" for other in range(dist.get_world_size())], AT_EXIT)
    except dist.DistError:  # after the time is over, or without rank 0, which keeps the store
        if rank > 0:
            stderr.write(sys.stderr.getvalue())
    else:
        dist.destroy_process_group()  # or its threads, now and then, abort the process


def from_rank_0(function: Callable[[], Any]) -> Any:
    """What ``function()`` returns on rank 0, or in the only process; no other rank calls it."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    box = [function() if first else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def own_device(name: str) -> torch.device:
    """The device of this process; under torchrun, ``cuda`` is a GPU that no other process has."""
    device = check_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
