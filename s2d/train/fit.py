"""The training loop of the SoFT loss: AdamW, a learning rate schedule, checkpoints."""

import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint import is_fast
from ..checkpoint.notices import PROGRESS_SECONDS, tell
from ..soft import soft_losses
from ..speed.tensor_parallel import from_rank_0
from .data import Rows
from .fsdp import Divided, count_ranks, load_checkpoint, save_checkpoint
from .teacher import Teacher

CHECKPOINT_SECONDS = 300  # between two checkpoints, at least


@dataclass(frozen=True)
class Recipe:
    batch: int  # rows per step, over all processes
    micro_batch: int  # rows that go through the model at once
    length: int  # tokens per row
    lr: float  # at its peak
    millions: float | None = None  # of tokens, or all that there are
    epochs: int = 1
    weight_decay: float = 0.1
    init: str = ""  # the model whose first layers it begins with
    exits: tuple[int, ...] = ()
    data: str = ""  # what it learns, as it was named
    all_text: bool = False
    teacher: str | None = None
    align: float | None = None


@dataclass(frozen=True)
class Run:
    out: Path  # the folder or file that it writes
    device: str = "cpu"
    seed: int = 0

    @property
    def unfinished(self) -> Path:
        """The file from which a training goes on; it is there until ``out`` is written."""
        return self.out.with_name(f"{self.out.name}.checkpoint")


def fit(
    model: Divided, rows: Rows, recipe: Recipe, run: Run, teacher: Teacher | None = None
) -> Iterator[Tensor]:
    """Train ``model`` in place, all exits together; yields the losses (E,) of each step.

    The loss is the mean over all labelled tokens of a step, however they are divided among
    micro-batches and processes. A training goes on from its checkpoint if that is there, and has
    the losses and weights of an uninterrupted one. Raises ValueError if the checkpoint is another
    training's, and if the loss is not finite.
    """
    tokens, labels = rows
    exits = recipe.exits
    device = model.model.device
    ranks = count_ranks()
    rank = dist.get_rank() if dist.is_initialized() else 0
    bf16 = is_fast(torch.bfloat16, device)  # for matmuls; all else stays float32
    loss_function = soft_losses if teacher is None else teacher.losses
    optimizer = make_optimizer(model, recipe.weight_decay)
    batches = order_rows(len(tokens), recipe.epochs, run.seed).split(recipe.batch)
    steps = len(tokens) * recipe.epochs // recipe.batch
    # All that decides what the losses are. The size of micro-batches only changes the rounding.
    settings = asdict(replace(recipe, micro_batch=1)) | {"seed": run.seed}
    settings["content of the data"] = zlib.crc32(tokens.numpy())
    done = 0
    if run.unfinished.exists():
        done = load_checkpoint(run.unfinished, model, optimizer, settings)
    told = saved = time.monotonic()
    for step in range(done, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.lr)
        batch = batches[step]
        count = (labels[batch] != -100).sum().item()
        losses = torch.zeros(len(exits), device=device)
        for part in batch[rank::ranks].split(recipe.micro_batch):
            inputs = tokens[part].to(device), labels[part].to(device), exits
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                own = model(loss_function, *inputs) / max(1, count)
            (own.mean() * ranks).backward()  # gradients are averaged over processes
            losses += own.detach()
        if ranks > 1:
            dist.all_reduce(losses)
        if not losses.isfinite().all():
            raise ValueError(f"the loss of step {step + 1} is not finite; try a lower --lr")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if time.monotonic() - told > PROGRESS_SECONDS or step + 1 == steps:
            told = time.monotonic()
            by_exit = [f"exit {each}: {loss:.3f}" for each, loss in zip(exits, losses)]
            tell(f"{run.out.name} step {step + 1}/{steps}  {'  '.join(by_exit)}")
        # The clock of rank 0 counts.
        is_due = from_rank_0(lambda: time.monotonic() - saved > CHECKPOINT_SECONDS)  # noqa: B023
        if is_due:
            save_checkpoint(run.unfinished, model, optimizer, settings | {"step": step + 1})
            saved = time.monotonic()
        yield losses


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, which lets matrices alone decay."""
    groups = []
    for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
        parameters = [each for each in model.parameters() if (each.dim() == 2) == is_matrix]
        groups.append({"params": parameters, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 4 % of the steps, then a cosine to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1, round(0.04 * steps)))
    falling = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * rising * (0.05 + 0.95 * falling)


def order_rows(rows: int, epochs: int, seed: int) -> Tensor:
    """Row numbers: in the first epoch in their own order, then shuffled anew in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    later = [torch.randperm(rows, generator=generator) for _ in range(epochs - 1)]
    return torch.cat([torch.arange(rows), *later])
