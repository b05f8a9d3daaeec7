"""A target that is divided among the processes that torchrun started: tensor parallelism.

Attention heads and the MLP's inner width are divided among the ranks (Shoeybi et al. 2019, arXiv
1909.08053, section 3), as gpt-fast does it. A block needs two sums over the ranks, after ``o_proj``
and after ``down_proj``. All else is whole on every rank.

All ranks run the same program on the same arguments: all draft, and all verify. The sums are the
same on all ranks, so their trees are the same too, if the processors are of one kind.
"""

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.config import ModelFolder
from ..checkpoint.load import check_device, load_model
from ..model import Llama

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}
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


def load_part(folder: ModelFolder, device: str, dtype: str) -> Llama:
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights.

    Raises ValueError if the parts would not be of one size.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    config = folder.config
    kv_heads = config.num_key_value_heads  # each with its queries
    for size, what in ((kv_heads, "key/value heads"), (config.intermediate_size, "MLP units")):
        if size % ranks:
            words = f"{size} {what} cannot be divided among {ranks} processes"
            raise ValueError(f"{folder.path}: {words}")

    def share(name: str, tensor: Tensor) -> Tensor:
        kind = name.split(".")[-2]
        return tensor.chunk(ranks, DIVIDED[kind])[rank] if kind in DIVIDED else tensor

    part = replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        num_key_value_heads=kv_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )
    model = load_model(folder._replace(config=part), own_device(device), dtype, share=share)
    for block in model.model.layers:
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.register_forward_hook(sum_over_ranks)
    return model


def sum_over_ranks(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """After a matmul with some columns of a weight: every rank has one summand of ``output``."""
    dist.all_reduce(output)
