"""The training loop of the SoFT loss: all exits at once, with checkpoints.

Of several processes each holds a part of the model, by PyTorch's FSDP2.
"""

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from ..checkpoint.files import staged
from ..checkpoint.load import is_fast
from ..checkpoint.notices import PROGRESS_SECONDS, tell
from ..model import Llama
from ..passes.processes import from_rank_0
from ..soft import soft_losses

CHECKPOINT_SECONDS = 300  # between two checkpoints, at least
WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, on the CPU
Rows = tuple[Tensor, Tensor]  # tokens and labels, (R, T) each


def make_adamw(model: nn.Module, weight_decay: float) -> Optimizer:
    """AdamW, which lets matrices alone decay."""
    groups = []
    for is_matrix, decay in ((True, weight_decay), (False, 0.0)):
        parameters = [each for each in model.parameters() if (each.dim() == 2) == is_matrix]
        groups.append({"params": parameters, "weight_decay": decay})
    return AdamW(groups, betas=(0.9, 0.95), fused=True)


def warm_up_and_cosine(step: int, steps: int, peak: float) -> float:
    """The learning rate rises for the first 4 % of the steps, then falls to a twentieth."""
    rising = min(1.0, (step + 1) / max(1, round(0.04 * steps)))
    falling = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * rising * (0.05 + 0.95 * falling)


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
    weights: tuple[float, ...] = ()  # of the exits' losses; without any, all are equal
    data: str = ""  # what it learns, as it was named
    all_text: bool = False
    teacher: str | None = None
    align: float | None = None
    # The arguments and results of other functions are as those of these three.
    loss: Callable[..., Tensor] = field(default=soft_losses, repr=False)
    schedule: Callable[..., float] = field(default=warm_up_and_cosine, repr=False)
    make_optimizer: Callable[..., Optimizer] = field(default=make_adamw, repr=False)


@dataclass(frozen=True)
class Run:
    out: Path  # the folder or file that it writes
    device: str = "cpu"
    seed: int = 0

    @property
    def unfinished(self) -> Path:
        """The file from which a training goes on; it is there until ``out`` is written."""
        return self.out.with_name(f"{self.out.name}.checkpoint")

    @property
    def losses(self) -> Path:
        """The file with the losses of each step."""
        return self.out.with_name(f"{self.out.name}.losses.jsonl")


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


def fit(model: Divided, rows: Rows, recipe: Recipe, run: Run) -> Iterator[Tensor]:
    """Train ``model`` in place, all exits together; yields the losses (E,) of each step.

    An exit's loss is the mean over all labelled tokens of a step, however they are divided among
    micro-batches and processes. The mean of the exits' losses by ``recipe.weights`` is minimised.
    The losses are yielded, and written to ``run.losses`` after the last step, without the weights.
    If there is a checkpoint, the training goes on from it, as if it had not been interrupted.
    Raises ValueError if a loss is not finite, or if the checkpoint is of a training with other
    settings; functions are compared by ``describe``.
    """
    tokens, labels = rows
    exits = recipe.exits
    device = model.model.device
    ranks = count_ranks()
    rank = dist.get_rank() if dist.is_initialized() else 0
    bf16 = is_fast(torch.bfloat16, device)  # for matmuls; all else stays float32
    weights = torch.tensor(recipe.weights or [1] * len(exits), device=device).float()  # (E,)
    weights /= weights.mean()
    optimizer = recipe.make_optimizer(model, recipe.weight_decay)
    steps = len(tokens) * recipe.epochs // recipe.batch
    # All that decides what the losses are. The size of micro-batches only changes the rounding.
    settings = vars(replace(recipe, micro_batch=1)) | {"seed": run.seed}
    settings["content of the data"] = zlib.crc32(labels.numpy(), zlib.crc32(tokens.numpy()))
    for name in ("loss", "schedule", "make_optimizer"):
        settings[name] = describe(settings[name])
        if any(sign in settings[name] for sign in ("<lambda>", " at 0x", "\n")):
            tell(f"the {name} has no name of its own: a later run cannot continue this training")
            settings[name] += f" of {time.time()}"
    log: list[dict] = []
    if run.unfinished.exists():
        log = load_checkpoint(run.unfinished, model, optimizer, settings)["log"]
        tell(f"{run.unfinished}: the training goes on after step {len(log)} of {steps}")
    batches = islice(order_rows(len(tokens), recipe.batch, run.seed), len(log), None)
    told = saved = time.monotonic()
    for step, batch in zip(range(len(log), steps), batches):
        lr = recipe.schedule(step, steps, recipe.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        count = (labels[batch] != -100).sum().item()
        losses = torch.zeros(len(exits), device=device)
        for part in batch[rank::ranks].split(recipe.micro_batch):
            inputs = tokens[part].to(device), labels[part].to(device), exits
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                own = model(recipe.loss, *inputs) / max(1, count)  # (E,)
            ((own * weights).mean() * ranks).backward()  # gradients are averaged over processes
            losses += own.detach()
        if ranks > 1:
            dist.all_reduce(losses)
        if not losses.isfinite().all():
            raise ValueError(f"the loss of step {step + 1} is not finite; try a lower --lr")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        by_exit = dict(zip(exits, losses.tolist()))
        log.append({"step": step + 1, "lr": lr, "losses": by_exit})
        if time.monotonic() - told > PROGRESS_SECONDS or step + 1 == steps:
            told = time.monotonic()
            words = [f"exit {each}: {value:.3f}" for each, value in by_exit.items()]
            tell(f"{run.out.name} step {step + 1}/{steps}  {'  '.join(words)}")
        # The clock of rank 0 counts.
        if from_rank_0(lambda: time.monotonic() - saved > CHECKPOINT_SECONDS):  # noqa: B023
            save_checkpoint(run.unfinished, model, optimizer, settings | {"log": log})
            saved = time.monotonic()
        yield losses
    if rank == 0:
        with staged(run.losses) as file:
            file.write_text("".join(f"{json.dumps(each)}\n" for each in log))


def describe(value: Any) -> str:
    """A text that tells a function, or what it holds, from others, also in a later run."""
    if isinstance(value, partial):
        held = [value.func, *value.args, *chain(*value.keywords.items())]
        return f"partial({', '.join(map(describe, held))})"
    if not isinstance(value, FunctionType):
        return repr(value)
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    held += value.__defaults__ or ()
    return f"{value.__module__}.{value.__qualname__}({', '.join(map(describe, held))})"


def order_rows(rows: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield row numbers (batch,): at first in their own order, then shuffled in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(rows)
    while True:
        while len(order) < batch:
            order = torch.cat((order, torch.randperm(rows, generator=generator)))
        yield order[:batch]
        order = order[batch:]


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
