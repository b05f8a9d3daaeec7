"""A target that is divided among several processes: tensor parallelism.

Attention heads and the MLP's inner width are divided among the ranks (Shoeybi et al. 2019, arXiv
1909.08053, section 3). A block needs two sums over the ranks, after ``o_proj`` and after
``down_proj``. Embedding and LM head, a hundredth of a large model, are whole on every rank.

Each pass is made on all ranks at once, for which rank 0 sends commands. It alone drafts and
verifies: one bit of difference at a threshold, and another rank would have another tree.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cache import KVCache
from ..checkpoint import load_model
from ..checkpoint.config import read_config
from ..model import Llama
from .ranks import from_rank_0, own_device

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}


@torch.inference_mode()
def follow(commands: dist.ProcessGroup) -> None:
    """On the other ranks: do what rank 0 sends, until it ends."""
    while (command := from_rank_0(lambda: None, commands)) != ("end",):
        name, *arguments = command
        if name == "load":
            part = load_part(*arguments)
        elif name == "new_cache":
            cache = new_part_of_cache(part, *arguments)
        elif name == "keep":
            cache.keep(*arguments)
        else:
            part(**move(*arguments, part.device), cache=cache)


class DividedTarget(nn.Module):
    """The target on rank 0; what is done with it, the other ranks do with their parts of it."""

    def __init__(self, send: Callable, path: Path, device: str, dtype: str) -> None:
        super().__init__()
        self.send = send
        self.send("load", path, device, dtype)
        self.part = load_part(path, device, dtype)
        self.ranks = dist.get_world_size()
        self.config = self.part.config
        self.device = self.part.device
        self.dtype = self.part.dtype

    def new_cache(self, capacity: int) -> "DividedCache":
        return DividedCache(self.send, self.part, capacity)

    def forward(self, cache: "DividedCache", **inputs: Any) -> Tensor:
        self.send("forward", move(inputs, "cpu"))
        return self.part(**inputs, cache=cache.part)


class DividedCache:
    """The KV cache of a DividedTarget on rank 0; the other ranks have their part of the newest."""

    def __init__(self, send: Callable, part: Llama, capacity: int) -> None:
        self.send = send
        self.send("new_cache", capacity)
        self.part = new_part_of_cache(part, capacity)

    @property
    def length(self) -> int:
        return self.part.length

    def keep(self, n: int, offsets: list[int]) -> None:
        self.send("keep", n, offsets)
        self.part.keep(n, offsets)


def new_part_of_cache(part: Llama, capacity: int) -> KVCache:
    """A KV cache of the heads that are in this rank's part of a model."""
    kv_heads = part.config.num_key_value_heads // dist.get_world_size()
    return part.new_cache(capacity, kv_heads=kv_heads)


def move(inputs: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def load_part(path: Path, device: str, dtype: str) -> Llama:
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
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
