"""Several processes, as torchrun starts them: rank 0 runs the program, the others follow it.

A target can be divided among them. Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053,
section 3): attention heads and the MLP's inner width are divided among the ranks. A block needs two
sums over the ranks, after ``o_proj`` and after ``down_proj``. Embedding and LM head, a hundredth of
a large model, are whole on every rank.

Each pass is made on all ranks at once, for which rank 0 sends commands. It alone drafts and
verifies: one bit of difference at a threshold, and another rank would have another tree. A rank
that fails just ends; torchrun notices, and ends the others, whatever they are waiting for.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..model import Llama
from ..weights import check_device, load_model
from ..weights.config import read_config

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}
A_PASS = timedelta(minutes=5)  # to wait for another rank that does the same
A_PERSON = timedelta(days=1)  # to wait for the next command, if somebody types


@contextmanager
def joined(device: torch.device) -> Iterator[DeviceMesh]:
    """A mesh of the processes on such a ``device``; only rank 0 of them gives notices."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(timeout=A_PASS)
    with redirect_stderr(io.StringIO()) if dist.get_rank() > 0 else nullcontext():
        yield init_device_mesh(device.type, (dist.get_world_size(),))
    # Not after an error: with others in the middle of a pass, this could wait for them for ever.
    time.sleep(0.1)  # gloo's threads abort if Python ends before they do
    dist.destroy_process_group()


def from_rank_0(function: Callable[[], Any], group: Any = None) -> Any:
    """What ``function()`` returns on rank 0, or in the one process; no other rank calls it."""
    if not dist.is_initialized():
        return function()
    box = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, group=group)
    return box[0]


def checked_by_rank_0(check: Callable[[], Any]) -> Any:
    """What ``check()`` returns on every rank; if it raises on rank 0, the others just end."""

    def outcome():
        try:
            return check(), None
        except (ValueError, OSError) as error:
            return None, error

    result, error = from_rank_0(outcome)
    if error is None:
        return result
    if dist.is_initialized() and dist.get_rank() > 0:
        sys.exit(2)
    raise error


def run_on_rank_0(program: Callable, load_part: Callable) -> Any:
    """``program(load_target)`` on rank 0; the other ranks make that target's passes with it."""
    with joined(torch.device("cpu")):
        commands = dist.new_group(timeout=A_PERSON)

        def send(*command: Any) -> None:
            from_rank_0(lambda: command, commands)

        result = None
        if dist.get_rank() > 0:
            try:
                with connected():
                    follow(load_part, commands)
            except ConnectionError:  # rank 0 has said why
                os._exit(2)  # without Python's end, which aborts while gloo's threads run
        else:
            with connected():
                result = program(partial(DividedTarget, send, load_part))
                send("end")
        return result


@contextmanager
def connected() -> Iterator[None]:
    """Raise ConnectionError, and not PyTorch's RuntimeError, if another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if "by peer" not in str(error):
            raise
        raise ConnectionError("another process has ended") from None


@torch.inference_mode()
def follow(load_part: Callable, commands: Any) -> None:
    """On the other ranks: do what rank 0 sends, until it ends."""
    error = None
    while (command := from_rank_0(lambda: None, commands)) != ("end",):
        if error is not None:
            raise error
        name, *arguments = command
        if name == "load":
            try:
                part = load_part(*arguments)
            except (ValueError, OSError) as failed:
                error = failed  # if rank 0 has the same error, it prints it, and sends no more
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

    def __init__(self, send: Callable, load_part: Callable, path: Path, device: str, dtype: str):
        super().__init__()
        self.send = send
        self.send("load", path, device, dtype)
        self.part = load_part(path, device, dtype)
        self.config, self.device, self.dtype = self.part.config, self.part.device, self.part.dtype

    def pass_costs(self, rows: int) -> None:
        return None  # not known

    def new_cache(self, capacity: int) -> "DividedTarget":
        self.send("new_cache", capacity)
        self.cache = self.part.new_cache(capacity)
        return self

    @property
    def length(self) -> int:
        return self.cache.length

    def keep(self, length: int, slots: list[int]) -> None:
        self.send("keep", length, slots)
        self.cache.keep(length, slots)

    def forward(self, cache: "DividedTarget", **inputs: Any) -> Tensor:
        self.send("forward", moved(inputs, "cpu"))
        return self.part(**inputs, cache=self.cache)


def moved(inputs: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def load_part(path: Path, device: str, dtype: str) -> Llama:
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights."""
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), read_config(path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads % ranks:
        raise ValueError(f"{path}: {kv_heads} key/value heads cannot be divided among {ranks}")
    if check_device(device).type == "cuda":
        torch.cuda.set_device(check_device(device))

    def share(name: str, shape: tuple[int, ...]) -> Any:
        dim = DIVIDED.get(name.split(".")[-2])
        if dim is None:
            return ...
        size = -(-shape[dim] // ranks)  # the last rank may have less
        own = slice(rank * size, (rank + 1) * size)
        return own if dim == 0 else (slice(None), own)

    model = load_model(path, device, dtype, share=share)
    for block in model.model.layers:
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.register_forward_hook(sum_over_ranks)
    # Of this rank: its KV caches hold no other heads.
    own = {"num_attention_heads": heads // ranks, "num_key_value_heads": kv_heads // ranks}
    model.config = replace(config, **own)
    return model


def sum_over_ranks(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """After a matmul with a part of a weight's columns: each rank has one summand."""
    dist.all_reduce(output)
