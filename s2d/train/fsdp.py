"""A model in training: divided among processes by PyTorch's FSDP2, saved and loaded whole."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..checkpoint import empty_model
from ..checkpoint.files import staged
from ..model import Llama
from ..speed.tensor_parallel import from_rank_0

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, on the CPU


class Divided(nn.Module):
    """A model whose weights are divided among the processes of a ``mesh``, if there is one.

    Each layer is together only while it is needed, and the rest of the model in ``forward``.
    ``checksum`` is of the weights with which it begins.
    """

    def __init__(self, model: Llama, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.model = model
        self.mesh = mesh
        self.checksum = compute_checksum(model)
        if mesh is None:
            return
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP asks for it
        # All that is not in a matmul stays float32, as in one process.
        for module in (*model.model.layers, self):
            fully_shard(module, mesh=mesh)

    def forward(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """``function(model, *arguments)``."""
        return function(self.model, *arguments)

    def gather(self) -> Llama | None:
        """The whole model, for rank 0; None for the others."""
        if self.mesh is None:
            return self.model
        state = get_model_state_dict(self.model, options=WHOLE)
        if self.mesh.get_local_rank() > 0:
            return None
        whole = empty_model(self.model.config)
        whole.load_state_dict(state, assign=True)
        return whole


def compute_checksum(model: nn.Module) -> int:
    """A number for the weights of a model, of about a thousand of each tensor."""
    total = 0
    for parameter in model.parameters():
        some = parameter.detach().flatten()[:: max(1, parameter.numel() // 1000)]
        total = zlib.crc32(some.float().cpu().numpy().tobytes(), total)
    return total


def save_checkpoint(
    file: Path,
    model: Divided,
    optimizer: torch.optim.Optimizer,
    step: int,
    settings: dict[str, Any],
) -> None:
    """Have rank 0 write the whole state after ``step``; a file before it is replaced."""
    weights, state = get_state_dict(model.model, optimizer, options=WHOLE)

    def write() -> None:
        with staged(file) as stage:
            try:
                torch.save((settings, step, weights, state), stage)
            except RuntimeError as error:  # so PyTorch says that a disk is full
                raise OSError(f"{file} cannot be written: {error}") from None

    from_rank_0(write)  # the other ranks wait for it


def load_checkpoint(
    file: Path, model: Divided, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> int:
    """Take the state in ``file``; returns the number of steps done.

    Raises ValueError if the training was begun with other ``settings``.
    """
    try:
        begun, step, weights, state = torch.load(file, map_location="cpu", mmap=True)
    except (RuntimeError, ValueError, TypeError, EOFError) as error:
        raise ValueError(f"{file} is no checkpoint, or is damaged: {error}") from None
    for name, value in settings.items():
        if begun.get(name) != value:
            raise ValueError(f"{file} was begun with {name} {begun.get(name)}, not {value}")
    set_state_dict(
        model.model, optimizer, model_state_dict=weights, optim_state_dict=state, options=WHOLE
    )
    return step
