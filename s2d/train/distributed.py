"""Training divided among processes by PyTorch's FSDP2, and checkpoints, also for one process.

Weights, gradients and AdamW's state are divided among the ranks; the weights of a layer are
gathered when it runs.
"""

import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..extras.parallel import from_rank_0
from ..weights import empty_model

SETTINGS = "settings.json"  # in a checkpoint: of what training it is


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
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = state_dict.get_model_state_dict(model, options=options)
    if mesh.get_local_rank() > 0:
        return None
    whole = empty_model(model.config)
    whole.load_state_dict(state, assign=True)
    return whole


def state_of(model, optimizer):
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model_state_dict": model_state, "optim_state_dict": optimizer_state}


def save_checkpoint(folder, model, optimizer, step, settings):
    """Write the state after ``step`` to ``folder/STEP``, each rank its part; older ones go then.

    ``settings`` is a text that says of what training the state is.
    """
    stage = folder / "unfinished"

    def finish():
        (stage / SETTINGS).write_text(settings)
        older = list(folder.glob("[0-9]*"))
        stage.rename(folder / str(step))
        for path in older:
            shutil.rmtree(path)

    from_rank_0(lambda: shutil.rmtree(stage, ignore_errors=True))  # the other ranks wait for it
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=stage, no_dist=not dist.is_initialized())
    from_rank_0(finish)


def load_checkpoint(folder, model, optimizer, settings):
    """Take the newest state in ``folder``, if any; returns the number of steps done.

    Raises ValueError where it was made with other ``settings``.
    """
    step = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    if step == 0:
        return 0
    newest = folder / str(step)
    found = (newest / SETTINGS).read_text()
    if found != settings:
        other = f"{newest} is of another training, {found}, not {settings}"
        raise ValueError(f"{other}; remove it or name another folder")
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=newest, no_dist=not dist.is_initialized())
    state_dict.set_state_dict(model, optimizer, **state)
    return step
