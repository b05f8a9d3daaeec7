"""Training divided among processes, and checkpoints of it. PyTorch's FSDP2 and distributed checkpoints, also for one process.

Weights, gradients and AdamW's state are divided among the ranks, and the weights of a layer gathered when it runs.
"""

import json
import warnings
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..files import former_of, stage_of, staged_folder
from ..weights import empty_model
from ..weights.config import read_json

LEARNING = StateDictOptions(
    ignore_frozen_params=True, strict=False
)  # what stays as it was needs no checkpoint
IDENTITY = "training.json"  # in a checkpoint: what training it belongs to


class Objective(nn.Module):
    """A model and a loss of it in one forward pass: FSDP gathers weights where a module's forward pass begins."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args, **options):
        return self.loss(self.model, *args, **options)


def shard(objective, mesh, bf16):
    """Divide weights, gradients and optimizer state among the ranks, layer by layer; gradients are added in float32."""
    for parameter in objective.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP asks for it
    if bf16:  # FSDP rounds what a block is given; torch 2.11 forgets it where the block runs again for its gradient
        for table in objective.model.buffers():
            table.data = table.data.bfloat16()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    for block in objective.model.model["layers"]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)


def add_up(tensor):
    """Sum ``tensor`` over the ranks, in place."""
    dist.all_reduce(tensor)


def gathered(model, mesh):
    """The whole model, on the CPU, for rank 0; None for the others. A model that was not sharded is returned as it is."""
    if mesh is None:
        return model
    state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if mesh.get_local_rank() > 0:
        return None
    whole = empty_model(model.config)
    whole.load_state_dict(state, assign=True)
    return whole


@contextmanager
def _quiet():
    """Without the warning that a checkpoint of a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        yield


def save_checkpoint(path, model, optimizer, step, identity):
    """Write the state of a training, each rank its own part, to a folder that appears in one piece.

    ``identity`` is a dict of what the training is made of: numbers and text.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=LEARNING)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    alone = not dist.is_initialized()
    writes = alone or dist.get_rank() == 0
    stage = staged_folder(path, "checkpoint") if writes else nullcontext(stage_of(path))
    with stage as folder, _quiet():
        if writes:
            (folder / IDENTITY).write_text(json.dumps(identity))
        if not alone:
            dist.barrier()  # nobody writes before the folder is there
        dcp.save(state, checkpoint_id=folder, no_dist=alone)
    if not alone:
        dist.barrier()


def load_checkpoint(path, model, optimizer, identity):
    """Take up the training that ``save_checkpoint`` wrote; returns the steps it has done, 0 where there is none.

    Raises ValueError where it was made of something else than ``identity`` says.
    """
    path = next((p for p in (path, former_of(path)) if (p / ".metadata").is_file()), None)
    if path is None:
        return 0
    found = read_json(path / IDENTITY)
    if different := [
        f"{key} {found.get(key)}, not {value}"
        for key, value in identity.items()
        if found.get(key) != value
    ]:
        raise ValueError(
            f"{path} is of another training: {'; '.join(different)}; remove it or name another folder"
        )
    model_state, optimizer_state = get_state_dict(model, optimizer, options=LEARNING)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    with _quiet():
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=LEARNING,
    )
    return state["step"]
