"""Several processes, as torchrun starts them: rank 0 runs the program, the others follow it.

A target that is divided among them (weights/divided.py) makes each pass on all ranks at once, for
which rank 0 sends commands. It alone drafts and verifies: one bit of difference at a threshold, and
another rank would have another tree.
"""

import io
import time
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


@contextmanager
def joined(device):
    """A DeviceMesh of the processes; only rank 0 of them gives notices."""
    dist.init_process_group(timeout=timedelta(days=1))  # rank 0 may wait for someone who types
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with redirect_stderr(io.StringIO()) if dist.get_rank() > 0 else nullcontext():
            yield init_device_mesh(device.type, (dist.get_world_size(),))
    finally:
        time.sleep(0.1)  # gloo's threads abort if Python ends before they do
        dist.destroy_process_group()


def from_rank_0(function):
    """What ``function()`` returns on rank 0, or in the one process; no other rank calls it."""
    if not dist.is_initialized():
        return function()
    box = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def send(*command):
    from_rank_0(lambda: command)


def run_on_rank_0(program, load_part):
    """``program(load_target)`` on rank 0; the other ranks make that target's passes with it."""
    with joined(torch.device("cpu")):
        if dist.get_rank() > 0:
            return follow(load_part)
        try:
            return program(partial(DividedTarget, load_part))
        finally:
            send("end")  # or the other ranks would wait


@torch.inference_mode()
def follow(load_part):
    """On the other ranks: do what rank 0 sends, until it ends."""
    while (command := from_rank_0(None)) != ("end",):
        name, *arguments = command
        if name == "load":
            with suppress(ValueError, OSError):  # rank 0 has the same error, and prints it
                part = load_part(*arguments)
        elif name == "new_cache":
            cache = part.new_cache(*arguments)
        elif name == "keep":
            cache.keep(*arguments)
        else:
            part(**moved(*arguments, part.device), cache=cache)


class DividedTarget(nn.Module):
    """The target on rank 0, and its one KV cache, the newest.

    What rank 0 does with the two, the other ranks do with their parts of them.
    """

    def __init__(self, load_part, path, device, dtype):
        super().__init__()
        send("load", path, device, dtype)
        self.part = load_part(path, device, dtype)
        self.config, self.device, self.dtype = self.part.config, self.part.device, self.part.dtype

    def new_cache(self, capacity):
        send("new_cache", capacity)
        self.cache = self.part.new_cache(capacity)
        return self

    @property
    def length(self):
        return self.cache.length

    def keep(self, length, path):
        send("keep", length, path)
        self.cache.keep(length, path)

    def forward(self, cache, **inputs):
        send("forward", moved(inputs, "cpu"))
        return self.part(**inputs, cache=self.cache)


def moved(inputs, device):
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
