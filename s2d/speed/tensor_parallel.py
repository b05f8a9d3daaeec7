"""Several processes, as torchrun starts them: rank 0 runs the program, the others follow it.

A target can be divided among them. Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053,
section 3): attention heads and the MLP's inner width are divided among the ranks. A block needs two
sums over the ranks, after ``o_proj`` and after ``down_proj``. Embedding and LM head, a hundredth of
a large model, are whole on every rank.

Each pass is made on all ranks at once, for which rank 0 sends commands. It alone drafts and
verifies: one bit of difference at a threshold, and another rank would have another tree.
"""

import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cache import KVCache
from ..checkpoint import check_device, load_model
from ..checkpoint.config import read_config
from ..cli.program import run_program
from ..model import Llama

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}
A_PERSON = timedelta(days=1)  # to wait for rank 0's next command, while somebody types


def run_in_each(name: str, function: Callable[..., int | None], *arguments: Any) -> int:
    """``run_program`` in each of the processes; rank 0 alone gives notices.

    The first rank that fails says why and exits, and torchrun then ends the others, whatever they
    wait for. Nothing is sent to them, and the process group is only destroyed after success: both
    would wait for ranks that are in some other collective (with NCCL for ever).
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group(store=store, rank=rank, world_size=ranks)

    def in_this_process() -> int | None:
        try:
            with redirect_stderr(io.StringIO()) if rank > 0 else nullcontext():
                return function(*arguments)
        except (Exception, KeyboardInterrupt):
            if store.add("failures", 1) > 1:
                time.sleep(30)  # another rank says why; torchrun ends this one meanwhile
            raise

    code = 1
    try:
        code = run_program(name, in_this_process)
    except SystemExit as end:  # of a command line's parser
        code = end.code
    except Exception:  # a bug; or another rank was killed, and torchrun ends this one as well
        time.sleep(1)
        traceback.print_exc()
    if code:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # Python's own end would destroy the process group
    time.sleep(0.1)  # gloo's threads abort if Python ends before they do
    dist.destroy_process_group()
    return 0


def from_rank_0(function: Callable[[], Any], group: Any = None) -> Any:
    """What ``function()`` returns on rank 0, or in the one process; no other rank calls it.

    A user's mistake, or the end of the program, is raised on all ranks.
    """
    if not dist.is_initialized():
        return function()
    result = error = None
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
    processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"under torchrun each process has its own GPU: cuda, not {name!r}")
    if name != "cpu" and 0 < gpus < processes:
        raise ValueError(f"torchrun started {processes} processes, and there are {gpus} GPUs")
    device = check_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def run_divided(name: str, program: Callable) -> int:
    """``program(load_target)`` on rank 0; the other ranks make that target's passes with it.

    ``load_target`` takes a folder, a device and a dtype, as ``load_model`` does. ``name`` is the
    program's in error messages. Returns the exit code.
    """
    return run_in_each(name, run_on_rank_0, program)


def run_on_rank_0(program: Callable) -> int | None:
    commands = dist.new_group(backend="gloo", timeout=A_PERSON)

    def send(*command: Any) -> None:
        from_rank_0(lambda: command, commands)

    if dist.get_rank() > 0:
        return follow(commands)
    try:
        code = program(partial(DividedTarget, send))
    except SystemExit as end:  # of the command line's parser
        code = end.code
    send("end")
    return code


@torch.inference_mode()
def follow(commands: Any) -> None:
    """On the other ranks: do what rank 0 sends, until it ends."""
    while (command := from_rank_0(lambda: None, commands)) != ("end",):
        name, *arguments = command
        if name == "load":
            part = load_part(*arguments)
        elif name == "new_cache":
            cache = part_of_cache(part, *arguments)
        elif name == "keep":
            cache.keep(*arguments)
        else:
            part(**moved(*arguments, part.device), cache=cache)


class DividedTarget(nn.Module):
    """The target on rank 0; what is done with it, the other ranks do with their parts of it."""

    def __init__(self, send: Callable, path: Path, device: str, dtype: str) -> None:
        super().__init__()
        self.send = send
        self.send("load", path, device, dtype)
        self.part = load_part(path, device, dtype)
        self.ranks = dist.get_world_size()
        self.config, self.device, self.dtype = self.part.config, self.part.device, self.part.dtype

    def new_cache(self, capacity: int) -> "DividedCache":
        return DividedCache(self.send, self.part, capacity)

    def forward(self, cache: "DividedCache", **inputs: Any) -> Tensor:
        self.send("forward", moved(inputs, "cpu"))
        return self.part(**inputs, cache=cache.part)


class DividedCache:
    """The KV cache of a DividedTarget on rank 0; the other ranks have their part of the newest."""

    def __init__(self, send: Callable, part: Llama, capacity: int) -> None:
        self.send = send
        self.send("new_cache", capacity)
        self.part = part_of_cache(part, capacity)

    @property
    def length(self) -> int:
        return self.part.length

    def keep(self, n: int, offsets: list[int]) -> None:
        self.send("keep", n, offsets)
        self.part.keep(n, offsets)


def part_of_cache(part: Llama, capacity: int) -> KVCache:
    """A KV cache of the heads that are in this rank's part of a model."""
    return part.new_cache(
        capacity, kv_heads=part.config.num_key_value_heads // dist.get_world_size()
    )


def moved(inputs: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def load_part(path: Path, device: str, dtype: str) -> Llama:
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kv_heads = read_config(path).num_key_value_heads
    if kv_heads % ranks:
        raise ValueError(f"{path}: {kv_heads} key/value heads cannot be divided among {ranks}")
    device = own_device(device)

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
    return model


def sum_over_ranks(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """After a matmul with a part of a weight's columns: each rank has one summand."""
    dist.all_reduce(output)
