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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..checkpoint import empty_model, is_fast
from ..files import read_json, staged_file
from ..model import Llama
from ..notices import PROGRESS_SECONDS, tell
from ..soft import soft_losses
from ..speed.ranks import from_rank_0
from .distil import Distillation

CHECKPOINT_SECONDS = 120  # between two checkpoints, at least
SAVING = 0.05  # the part of the time that saving them may take

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
    resume: bool = False  # from what is in the folder ``unfinished``
    mesh: DeviceMesh | None = None  # of the processes among which it is divided, if several

    @property
    def ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def unfinished(self) -> Path:
        """The folder from which --resume goes on; it is there until ``out`` is written."""
        return self.out.with_name(f"{self.out.name}.checkpoint")


def keep_settings(file: Path, settings: dict[str, Any]) -> None:
    """Write what a folder is begun with to ``file`` in it; ValueError if that was something else.

    Whatever can be resumed asks for this, so that nothing goes on with other settings.
    """
    text = json.dumps(settings)
    if not file.is_file():
        with staged_file(file) as stage:
            stage.write_text(text)
        return
    found = read_json(file)
    if found != json.loads(text):
        raise ValueError(f"{file.parent} was begun with {found}, not {settings}")


def fit(
    model: Llama,
    exits: tuple[int, ...],
    rows: Rows,
    recipe: Recipe,
    run: Run,
    distillation: Distillation | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Train ``model`` in place, all ``exits`` together; yields (step, losses (E,)) after each step.

    The loss is the mean over all labelled tokens of a step, however they are divided among
    micro-batches and processes. A resumed run has the losses of an uninterrupted one. Raises
    ValueError if its checkpoint is another training's, and if the loss is not finite any more.
    """
    tokens, labels = rows
    device = model.device
    rank = 0 if run.mesh is None else run.mesh.get_local_rank()
    check_batch(recipe, run.ranks)
    settings = describe_training(model, exits, rows, recipe, run, distillation)
    bf16 = recipe.bf16 and is_fast(torch.bfloat16, device)
    objective = Objective(model, partial(soft_losses, exits=exits, aim=distillation))
    if run.mesh is not None:
        shard(objective, run.mesh)
    optimizer = make_optimizer(model, recipe.weight_decay)
    order = order_rows(len(tokens), recipe.epochs, run.seed, recipe.shuffle_first)
    batches = order.split(recipe.batch)
    steps = len(tokens) * recipe.epochs // recipe.batch
    done = load_checkpoint(run.unfinished, model, optimizer, settings) if run.resume else 0
    began = time.monotonic()
    told = began
    saved = began
    until_save = CHECKPOINT_SECONDS
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
        due = now - saved > until_save
        if from_rank_0(lambda due=due: due):  # clocks differ
            save_checkpoint(run.unfinished, model, optimizer, step + 1, settings)
            saved = time.monotonic()
            until_save = max(CHECKPOINT_SECONDS, (saved - now) / SAVING)
        if now - told > PROGRESS_SECONDS or step + 1 == steps:
            told = now
            speed = (step + 1 - done) / (now - began)
            left = (steps - step - 1) / speed
            by_exit = "  ".join(f"exit {e}: {loss:.3f}" for e, loss in zip(exits, losses.tolist()))
            tell(
                f"{run.out.name} step {step + 1}/{steps}, {speed:.2f} per second, {left:.0f} s "
                f"left  {by_exit}"
            )
        yield step + 1, losses


def describe_training(
    model: Llama,
    exits: tuple[int, ...],
    rows: Rows,
    recipe: Recipe,
    run: Run,
    distillation: Distillation | None,
) -> dict[str, Any]:
    """All that decides what a training's losses are; a checkpoint of another one is no use."""
    tokens, labels = rows
    settings = asdict(recipe)
    del settings["micro_batch"]  # which changes nothing
    settings |= {"exits": exits, "seed": run.seed, "weights": compute_checksum(model)}
    settings["data"] = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(tokens.numpy().tobytes()))
    if distillation is not None:
        others = [value for name, value in vars(distillation).items() if name != "teacher"]
        teacher = compute_checksum(distillation.teacher)
        settings["aim"] = [repr(type(distillation)), teacher, *others]
    return settings


def compute_checksum(model: nn.Module) -> int:
    """A number for the weights of a model, by fewer than two thousand of each tensor."""
    total = 0
    for parameter in model.parameters():
        some = parameter.detach().flatten()[:: max(1, parameter.numel() // 1000)]
        total = zlib.crc32(some.float().cpu().numpy().tobytes(), total)
    return total


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


def check_batch(recipe: Recipe, ranks: int) -> None:
    """Raise ValueError if a batch cannot be divided among so many processes."""
    if recipe.batch % (ranks * recipe.micro_batch):
        parts = f"{ranks} processes and micro-batches of {recipe.micro_batch}"
        raise ValueError(f"a batch of {recipe.batch} rows cannot be divided among {parts}")


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
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = state_dict.get_model_state_dict(model, options=options)
    if mesh.get_local_rank() > 0:
        return None
    whole = empty_model(model.config)
    whole.drafting = model.drafting
    whole.load_state_dict(state, assign=True)
    return whole


def get_state(model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
    return {"model_state_dict": model_state, "optim_state_dict": optimizer_state}


@contextmanager
def raise_plainly() -> Iterator[None]:
    """Have PyTorch's checkpoints raise what went wrong; and not warn of a single process.

    Its CheckpointException is no Exception, and its text is a traceback.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        try:
            yield
        except CheckpointException as error:
            (first, _), *_ = error.failures.values()
            raise first from None


def save_checkpoint(
    folder: Path,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    step: int,
    settings: dict[str, Any],
) -> None:
    """Write the state after ``step`` to ``folder/STEP``, each rank its part; older ones go then."""
    stage = folder / "unfinished"

    def finish() -> None:
        keep_settings(folder / "settings.json", settings)
        older = list(folder.glob("[0-9]*"))
        stage.rename(folder / str(step))
        for path in older:
            shutil.rmtree(path)

    state = get_state(model, optimizer)
    try:
        with raise_plainly():
            dcp.save(state, checkpoint_id=stage, no_dist=not dist.is_initialized())
    except (OSError, RuntimeError):
        shutil.rmtree(stage, ignore_errors=True)  # it would take up a disk that may be full
        raise
    from_rank_0(finish)  # the other ranks wait for it


def load_checkpoint(
    folder: Path, model: Llama, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> int:
    """Take the newest state in ``folder``, if any; returns the number of steps done."""
    step = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    if step > 0:
        keep_settings(folder / "settings.json", settings)
        state = get_state(model, optimizer)
        with raise_plainly():
            dcp.load(state, checkpoint_id=folder / str(step), no_dist=not dist.is_initialized())
        state_dict.set_state_dict(model, optimizer, **state)
    return step
