"""A target that is divided among the processes that torchrun started: tensor parallelism.

Attention heads and the MLP's inner width are divided among the ranks (Shoeybi et al. 2019, arXiv
1909.08053, section 3). A block needs two sums over the ranks, after ``o_proj`` and after
``down_proj``. All else is whole on every rank: all draft and verify alike, since sums are the same.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import check_device, load_model
from ..checkpoint.config import read_config
from ..model import Llama

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}


def join_processes() -> None:
    """Join the processes that torchrun started, if it did; rank 0 alone prints."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if dist.get_rank() > 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")


def from_rank_0(function: Callable[[], Any]) -> Any:
    """What ``function()`` returns on rank 0, or in the only process; no other rank calls it."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    box = [function() if first else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def each_from_rank_0(items: Iterable[Any]) -> Iterator[Any]:
    """The ``items`` of rank 0, none of which is None; no other rank iterates over its own."""
    iterator = iter(items)
    while (item := from_rank_0(lambda: next(iterator, None))) is not None:
        yield item


def own_device(name: str) -> torch.device:
    """The device of this process: the CPU, or a GPU that no other has."""
    device = check_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def load_part(path: Path, device: str, dtype: str) -> Llama:
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    kv_heads = read_config(path).num_key_value_heads
    if kv_heads % ranks:
        raise ValueError(f"{path}: {kv_heads} key/value heads cannot be divided among {ranks}")

    def share(name: str, shape: tuple[int, ...]) -> Any:
        dim = DIVIDED.get(name.split(".")[-2])
        if dim is None:
            return ...
        size = -(-shape[dim] // ranks)  # the last rank may have less
        own = slice(rank * size, (rank + 1) * size)
        return own if dim == 0 else (slice(None), own)

    model = load_model(path, own_device(device), dtype, share=share)
    model.config = replace(model.config, num_key_value_heads=kv_heads // ranks)  # of its KV caches
    for block in model.model.layers:
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.register_forward_hook(lambda module, inputs, output: dist.all_reduce(output))
    return model
