"""The training loop: AdamW, a learning rate schedule, micro-batches, FSDP2, checkpoints.

All exits of a model learn together, by the SoFT loss (s2d/soft.py). Where torchrun started several
processes, PyTorch's FSDP2 gives each a part of the weights, gradients and AdamW's state.
"""

import json
import math
import shutil
import time
import warnings
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..cli.program import tell
from ..extras.tensor_parallel import from_rank_0
from ..soft import soft_losses
from ..weights import empty_model

CHECKPOINT_SECONDS, TELL_SECONDS = 120, 10


@dataclass(frozen=True)
class Recipe:
    batch: int  # rows per step, over all processes
    micro_batch: int  # rows that go through the model at once
    length: int  # tokens per row
    lr: float  # at its peak
    epochs: int = 1
    weight_decay: float = 0.1
    bf16: bool = True  # matmuls in bfloat16 where the device has them; all else stays float32


@dataclass(frozen=True)
class Run:
    out: Path  # the folder it writes
    device: str = "cpu"
    seed: int = 0
    resume: bool = False  # from its newest checkpoint
    mesh: Any = None  # of the processes among which it is divided, if there are several

    @property
    def checkpoints(self):
        return self.out.with_name(f"{self.out.name}.checkpoint")


def fit(model, exits, rows, recipe, run, distillation=None):
    """Train ``model`` in place, all ``exits`` together; yields (step, losses (E,)) after each step.

    ``rows`` are (tokens, labels), (R, T) each. The loss is the mean over all labelled tokens of a
    step, however they are divided among micro-batches and processes. A resumed run has the losses
    of an uninterrupted one. Raises ValueError where its checkpoint is another training's.
    """
    (tokens, labels), device, mesh = rows, model.device, run.mesh
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
    if recipe.batch % (ranks * recipe.micro_batch):
        parts = f"{ranks} processes and micro-batches of {recipe.micro_batch}"
        raise ValueError(f"a batch of {recipe.batch} rows cannot be divided among {parts}")
    data = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(tokens.numpy().tobytes()))
    settings = json.dumps(asdict(recipe) | {"exits": exits, "seed": run.seed, "data": data})

    # A processor without bfloat16 emulates it, several times slower than float32.
    fast = device.type == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    bf16 = recipe.bf16 and fast
    objective = Objective(model, partial(soft_losses, exits=exits, distillation=distillation))
    if mesh:
        shard(objective, mesh, bf16)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    decay = {"params": matrices, "weight_decay": recipe.weight_decay}
    others = {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decay, others], betas=(0.9, 0.95), fused=True)
    batches = row_order(len(tokens), recipe.epochs, run.seed).split(recipe.batch)
    steps = len(tokens) * recipe.epochs // recipe.batch
    done = load_checkpoint(run.checkpoints, model, optimizer, settings) if run.resume else 0
    began = told = saved = time.monotonic()
    for step in range(done, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.lr)
        batch, losses = batches[step], torch.zeros(len(exits), device=device)
        count = (labels[batch] != -100).sum().item()
        for part in batch[rank::ranks].split(recipe.micro_batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                own = objective(tokens[part].to(device), labels[part].to(device), count=count)
            (own.mean() * ranks).backward()  # gradients are averaged over processes
            losses += own.detach()
        if mesh:
            dist.all_reduce(losses)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        due = now - saved > CHECKPOINT_SECONDS
        if from_rank_0(lambda due=due: due):  # clocks differ
            save_checkpoint(run.checkpoints, model, optimizer, step + 1, settings)
            saved = now
        if now - told > TELL_SECONDS or step + 1 == steps:
            told, speed = now, (step + 1 - done) / (now - began)
            by_exit = "  ".join(f"exit {e}: {loss:.3f}" for e, loss in zip(exits, losses.tolist()))
            tell(f"{run.out.name} step {step + 1}/{steps}, {speed:.2f} per second  {by_exit}")
        yield step + 1, losses


def learning_rate(step, steps, peak, warmup=0.04):
    """Linear warm-up over the first 4 % of the steps, then a cosine to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1, round(warmup * steps)))
    return peak * rising * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def row_order(rows, epochs, seed):
    """Row numbers: first in their own order, in every further epoch shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(rows, generator=generator) for _ in range(epochs - 1)]
    return torch.cat([torch.arange(rows), *shuffled])


class Objective(nn.Module):
    """A model and its loss in one forward pass, at whose beginning FSDP gathers weights."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args, **options):
        return self.loss(self.model, *args, **options)


def shard(objective, mesh, bf16):
    """Divide the model by layers; gradients are added in float32."""
    for parameter in objective.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP asks for it
    dtype = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*objective.model.model.layers, objective):
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
    whole.drafting = model.drafting
    whole.load_state_dict(state, assign=True)
    return whole


def state_of(model, optimizer):
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model_state_dict": model_state, "optim_state_dict": optimizer_state}


def save_checkpoint(folder, model, optimizer, step, settings):
    """Write the state after ``step`` to ``folder/STEP``, each rank its part; older ones go then."""
    stage = folder / "unfinished"

    def finish():
        (stage / "settings.json").write_text(settings)
        older = list(folder.glob("[0-9]*"))
        stage.rename(folder / str(step))
        for path in older:
            shutil.rmtree(path)

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a single process
        dcp.save(state_of(model, optimizer), checkpoint_id=stage, no_dist=not dist.is_initialized())
    from_rank_0(finish)  # the other ranks wait for it


def load_checkpoint(folder, model, optimizer, settings):
    """Take the newest state in ``folder``, if any; returns the number of steps done."""
    step = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    if step > 0:
        found = (folder / str(step) / "settings.json").read_text()
        if found != settings:
            raise ValueError(f"{folder} is of another training: {found}, not {settings}")
        state = state_of(model, optimizer)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(state, checkpoint_id=folder / str(step), no_dist=not dist.is_initialized())
        state_dict.set_state_dict(model, optimizer, **state)
    return step
