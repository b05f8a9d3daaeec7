"""A model in training: divided among processes by PyTorch's FSDP2, saved and loaded whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ..checkpoint.files import staged
from ..model import Llama

WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, on the CPU


def count_ranks() -> int:
    """The number of processes among which a training is divided."""
    return dist.get_world_size() if dist.is_initialized() else 1


class Divided(nn.Module):
    """A model that learns. Its weights are divided among the processes, if there are several.

    A layer is whole only while it is needed, and what is not in layers during ``forward``.
    """

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model.requires_grad_(True)
        if count_ranks() == 1:
            return
        mesh = init_device_mesh(model.device.type, (count_ranks(),))
        # All that is not in a matmul stays float32, as in one process.
        for module in (*model.model.layers, self):
            fully_shard(module, mesh=mesh)

    def forward(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """``function(model, *arguments)``."""
        return function(self.model, *arguments)

    def gather(self) -> dict[str, Tensor]:
        """The whole weights by name, on rank 0; nothing on the others."""
        return state_dict.get_model_state_dict(self.model, options=WHOLE)


def save_checkpoint(file: Path, model: Divided, optimizer: Optimizer, about: dict) -> None:
    """Have rank 0 write the whole state, and what is ``about`` it: the settings and the losses."""
    weights, state = state_dict.get_state_dict(model.model, optimizer, options=WHOLE)
    if weights:  # on rank 0
        with staged(file) as stage:
            torch.save((about, weights, state), stage)


def load_checkpoint(file: Path, model: Divided, optimizer: Optimizer, settings: dict) -> dict:
    """Take the state in ``file``; returns what was saved about it.

    Raises ValueError if it is damaged, or if the training was begun with other ``settings``.
    """
    try:
        about, weights, state = torch.load(file, map_location="cpu", mmap=True)
    except Exception as error:  # what is no checkpoint fails in many ways
        raise ValueError(f"{file} is no checkpoint, or is damaged ({error})") from None
    for name, value in settings.items():
        before = about.get(name)
        if before != value:
            raise ValueError(f"{file} was begun with another {name}: {before}, not {value}")
    found = {"model_state_dict": weights, "optim_state_dict": state}
    state_dict.set_state_dict(model.model, optimizer, **found, options=WHOLE)
    return about
