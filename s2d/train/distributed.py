"""Training divided among processes by PyTorch's FSDP2, and checkpoints, also for one process.

Weights, gradients and AdamW's state are divided among the ranks, and the weights of a layer are
gathered when it runs. Knows nothing about text.
"""

import json
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..extras.parallel import from_rank_0
from ..fields import read_json
from ..files import former_of, stage_of, staged_folder
from ..weights import empty_model

# What stays as it was needs no checkpoint.
LEARNING = state_dict.StateDictOptions(ignore_frozen_params=True, strict=False)
WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
IDENTITY = "training.json"  # in a checkpoint: what training it belongs to


class Objective(nn.Module):
    """A model and its loss in one forward pass, at whose beginning FSDP gathers weights."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args, **options):
        return self.loss(self.model, *args, **options)


def shard(objective, mesh, bf16):
    """Divide weights, gradients and AdamW's state by layers; gradients are added in float32."""
    for parameter in objective.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP asks for it
    if bf16:  # FSDP rounds what a block is given; torch 2.11 forgets it where the block runs again
        for table in objective.model.buffers():
            table.data = table.data.bfloat16()
    dtype = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*objective.model.model["layers"], objective):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def gathered(model, mesh):
    """The whole model, on the CPU, for rank 0; None for the others. Without a mesh it is itself."""
    if mesh is None:
        return model
    state = state_dict.get_model_state_dict(model, options=WHOLE)
    if mesh.get_local_rank() > 0:
        return None
    whole = empty_model(model.config)
    whole.load_state_dict(state, assign=True)
    return whole


def state_of(model, optimizer, step):
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer, options=LEARNING)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def save_checkpoint(path, model, optimizer, step, identity):
    """Write a training's state, each rank its part, to a folder that appears in one piece.

    ``identity`` is a dict of what the training is made of: numbers and text.
    """
    state, alone = state_of(model, optimizer, step), not dist.is_initialized()
    first = alone or dist.get_rank() == 0
    folder = staged_folder(path, "checkpoint", True) if first else nullcontext(stage_of(path))
    with folder as stage, warnings.catch_warnings(action="ignore", category=UserWarning):
        # Nobody writes before the folder is there, or goes on before it has its name.
        from_rank_0(lambda: (stage / IDENTITY).write_text(json.dumps(identity)))
        dcp.save(state, checkpoint_id=stage, no_dist=alone)
    from_rank_0(lambda: None)


def load_checkpoint(path, model, optimizer, identity):
    """Go on from what ``save_checkpoint`` wrote; returns the steps done, 0 where there is nothing.

    Raises ValueError where it was made of something else than ``identity`` says.
    """
    path = next((p for p in (path, former_of(path)) if (p / ".metadata").is_file()), None)
    if path is None:
        return 0
    found = read_json(path / IDENTITY)
    changed = [f"{k} {found.get(k)}, not {v}" for k, v in identity.items() if found.get(k) != v]
    if changed:
        other = f"{path} is of another training: {'; '.join(changed)}"
        raise ValueError(f"{other}; remove it or name another folder")
    state = state_of(model, optimizer, 0)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a single process
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    states = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    state_dict.set_state_dict(model, optimizer, **states, options=LEARNING)
    return state["step"]
