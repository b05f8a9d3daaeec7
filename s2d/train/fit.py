"""The training loop: AdamW, a learning rate schedule, micro-batches, FSDP2, checkpoints.

All exits of a model learn together, by the SoFT loss (s2d/soft.py). Where torchrun started several
processes, PyTorch's FSDP2 gives each a part of the weights, gradients and AdamW's state.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..checkpoint import empty_model, is_fast
from ..checkpoint.files import staged
from ..checkpoint.notices import PROGRESS_SECONDS, tell
from ..model import Llama
from ..soft import Aim, soft_losses
from ..speed.tensor_parallel import from_rank_0

CHECKPOINT_SECONDS = 300  # between two checkpoints, at least
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, on the CPU

Rows = tuple[Tensor, Tensor]  # tokens and labels, (R, T) each


@dataclass(frozen=True)
class Recipe:
    batch: int  # rows per step, over all processes
    micro_batch: int  # rows that go through the model at once
    length: int  # tokens per row
    lr: float  # at its peak
    epochs: int = 1
    weight_decay: float = 0.1
    bf16: bool = True  # matmuls in bfloat16 if the device has them; all else stays float32
    shuffle_first: bool = True  # whether the first epoch is shuffled as the others are


@dataclass(frozen=True)
class Run:
    out: Path  # the folder or file that it writes
    device: str = "cpu"
    seed: int = 0
    resume: bool = False  # from the file ``unfinished``
    mesh: DeviceMesh | None = None  # of the processes among which it is divided, if several

    @property
    def ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def unfinished(self) -> Path:
        """The file from which --resume goes on; it is there until ``out`` is written."""
        return self.out.with_name(f"{self.out.name}.checkpoint")


def fit(
    model: Llama,
    exits: tuple[int, ...],
    rows: Rows,
    recipe: Recipe,
    run: Run,
    aim: Aim | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Train ``model`` in place, all ``exits`` together; yields (step, losses (E,)) after each step.

    The loss is the mean over all labelled tokens of a step, however they are divided among
    micro-batches and processes. A resumed run has the losses of an uninterrupted one. Raises
    ValueError if its checkpoint is another training's, and if the loss is not finite any more.
    """
    tokens, labels = rows
    device = model.device
    rank = 0 if run.mesh is None else run.mesh.get_local_rank()
    if recipe.batch % (run.ranks * recipe.micro_batch):
        parts = f"{run.ranks} processes and micro-batches of {recipe.micro_batch}"
        raise ValueError(f"a batch of {recipe.batch} rows cannot be divided among {parts}")
    if run.unfinished.exists() and not run.resume:
        raise ValueError(f"{run.unfinished} is there already; go on with --resume, or remove it")
    data = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(tokens.numpy().tobytes()))
    align = aim and (aim.align or "distributions")
    settings = repr((replace(recipe, micro_batch=1), exits, run.seed, data, align))
    bf16 = recipe.bf16 and is_fast(torch.bfloat16, device)
    objective = Objective(model, partial(soft_losses, exits=exits, aim=aim))
    if run.mesh is not None:
        shard(objective, run.mesh)
    optimizer = make_optimizer(model, recipe.weight_decay)
    order = order_rows(len(tokens), recipe.epochs, run.seed, recipe.shuffle_first)
    batches = order.split(recipe.batch)
    steps = len(tokens) * recipe.epochs // recipe.batch
    done = load_checkpoint(run.unfinished, model, optimizer, settings) if run.resume else 0
    began = told = saved = time.monotonic()
    for step in range(done, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.lr)
        batch = batches[step]
        count = (labels[batch] != -100).sum().item()
        losses = torch.zeros(len(exits), device=device)
        for part in batch[rank :: run.ranks].split(recipe.micro_batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                own = objective(tokens[part].to(device), labels[part].to(device), count=count)
            (own.mean() * run.ranks).backward()  # gradients are averaged over processes
            losses += own.detach()
        if run.mesh is not None:
            dist.all_reduce(losses, group=run.mesh.get_group())
        if not losses.isfinite().all():
            raise ValueError(f"the loss of step {step + 1} is not finite; try a lower --lr")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        if from_rank_0(lambda: now - saved > CHECKPOINT_SECONDS):  # noqa: B023 (clocks differ)
            save_checkpoint(run.unfinished, model, optimizer, step + 1, settings)
            saved = time.monotonic()
        if now - told > PROGRESS_SECONDS or step + 1 == steps:
            told = now
            speed = (step + 1 - done) / (now - began)
            by_exit = "  ".join(f"exit {e}: {loss:.3f}" for e, loss in zip(exits, losses.tolist()))
            left = (steps - step - 1) / speed
            tell(f"{run.out.name} step {step + 1}/{steps}, {left:.0f} s left  {by_exit}")
        yield step + 1, losses


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, which lets matrices alone decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 4 % of the steps, then a cosine to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1, round(0.04 * steps)))
    return peak * rising * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def order_rows(rows: int, epochs: int, seed: int, shuffle_first: bool) -> Tensor:
    """Row numbers, shuffled anew in every epoch, or in their own order in the first."""
    generator = torch.Generator().manual_seed(seed)
    first = [] if shuffle_first else [torch.arange(rows)]
    later = [torch.randperm(rows, generator=generator) for _ in range(epochs - len(first))]
    return torch.cat([*first, *later])


class Objective(nn.Module):
    """A model and its loss in one forward pass, at whose beginning FSDP gathers weights."""

    def __init__(self, model: Llama, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor, count: int) -> Tensor:
        return self.loss(self.model, tokens, labels, count=count)


def shard(objective: Objective, mesh: DeviceMesh) -> None:
    """Divide the model by layers; all that is not in a matmul stays float32, as in one process."""
    for parameter in objective.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP asks for it
    for module in (*objective.model.model.layers, objective):
        fully_shard(module, mesh=mesh)


def gather(model: Llama, mesh: DeviceMesh | None) -> Llama | None:
    """The whole model, on the CPU, for rank 0; None for the others. Without a mesh it is itself."""
    if mesh is None:
        return model
    state = get_model_state_dict(model, options=WHOLE)
    if mesh.get_local_rank() > 0:
        return None
    whole = empty_model(model.config)
    whole.load_state_dict(state, assign=True)
    return whole


def save_checkpoint(
    file: Path, model: Llama, optimizer: torch.optim.Optimizer, step: int, settings: str
) -> None:
    """Have rank 0 write the whole state after ``step``; a file before it is replaced."""
    weights, state = get_state_dict(model, optimizer, options=WHOLE)

    def write() -> None:
        with staged(file) as stage:
            torch.save((settings, step, weights, state), stage)

    from_rank_0(write)  # the other ranks wait for it


def load_checkpoint(
    file: Path, model: Llama, optimizer: torch.optim.Optimizer, settings: str
) -> int:
    """Take the state in ``file``, if it is there; returns the number of steps done."""
    if not file.is_file():
        return 0
    begun, step, weights, state = torch.load(file, map_location="cpu", mmap=True)
    if begun != settings:
        raise ValueError(f"{file} was begun with {begun}, not {settings}")
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state, options=WHOLE
    )
    return step
