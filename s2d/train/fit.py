"""Training a Llama's exits by AdamW, with checkpoints. Knows nothing about text."""

import math
import time
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..extras.parallel import from_rank_0
from ..files import check_free, former_of
from ..program import tell
from ..soft import soft_losses
from ..weights import checksum, placement
from .distributed import Objective, load_checkpoint, save_checkpoint, shard

CHECKPOINT_SECONDS = 120


@dataclass(frozen=True)
class Recipe:
    batch: int  # rows of a step, over all processes
    micro_batch: int  # rows that go through the model at once
    length: int  # tokens of a row
    lr: float  # at its peak
    epochs: int = 1
    weight_decay: float = 0.1
    recompute: bool = False  # activation checkpointing
    bf16: bool = True  # products under autocast; weights, gradients and AdamW stay in float32


@dataclass(frozen=True)
class Run:
    out: Path  # the folder it makes
    device: str = "cpu"
    seed: int = 0
    resume: bool = False  # from its checkpoint
    mesh: Any = None  # of the processes among which it is divided, if there are several
    replace: bool = False  # what is at ``out``, if it is ours


def checkpoint_of(out):
    return out.with_name(out.name + ".checkpoint")


def learning_rate(step, steps, peak, warmup=0.04):
    """Linear warm-up over the first 4 % of the steps, then a cosine to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1, round(warmup * steps)))
    return peak * rising * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def row_order(rows, epochs, seed):
    """Which row comes when: first in their own order, in every further epoch shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(rows, generator=generator) for _ in range(epochs - 1)]
    return torch.cat([torch.arange(rows), *shuffled])


def training_identity(model, exits, tokens, labels, recipe, seed, distillation):
    """Whatever changes the losses of a training: whoever resumes it must bring the same."""
    data = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(tokens.numpy().tobytes()))
    identity = {"model": checksum(model), "exits": list(exits), "data": f"{data:08x}", "seed": seed}
    identity |= {k: v for k, v in asdict(recipe).items() if k not in ("micro_batch", "recompute")}
    teacher = distillation and f"{checksum(distillation.teacher)} {distillation.kind}"
    return identity | {"teacher": teacher}


def check_out(run, read=()):
    """Raise ValueError where a ``run`` could not be saved, or would replace what it may not.

    Not even with --resume may it remove a checkpoint's folder that is not ours.
    """
    check_free(run.out, replace=run.replace, read=read)
    checkpoint = checkpoint_of(run.out)
    check_free(checkpoint, "checkpoint", replace=True, read=read)
    if not run.resume and any(path.exists() for path in (checkpoint, former_of(checkpoint))):
        unfinished = f"{checkpoint} is of a training that was cut short"
        raise ValueError(f"{unfinished}; go on with --resume, or remove it")
    run.out.parent.mkdir(parents=True, exist_ok=True)


def adamw(model, recipe):
    """AdamW over what learns; matrices decay, norms do not."""
    learning = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in learning if p.dim() == 2], "weight_decay": recipe.weight_decay}
    others = {"params": [p for p in learning if p.dim() != 2], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=recipe.lr, betas=(0.9, 0.95), fused=True)


def fit(model, exits, rows, recipe, run, distillation=None):
    """Train ``model`` in place, all ``exits`` together; yields (step, losses (E,)) after each step.

    ``rows`` are (tokens, labels), (R, T) each. The loss is the mean over all labelled tokens of a
    step, however they are divided among processes. A run that goes on from its checkpoint has the
    losses of an uninterrupted one; ValueError where that is another's, or would be lost.
    """
    tokens, labels = rows
    checkpoint, mesh, device = checkpoint_of(run.out), run.mesh, model.device
    identity = training_identity(model, exits, tokens, labels, recipe, run.seed, distillation)
    check_out(run)
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
    if recipe.batch % (ranks * recipe.micro_batch):
        parts = f"among {ranks} processes by {recipe.micro_batch} rows"
        raise ValueError(f"a batch of {recipe.batch} rows cannot be divided {parts}")
    loss = dict(exits=exits, distillation=distillation, recompute=recipe.recompute)
    objective = Objective(model, partial(soft_losses, **loss))
    if mesh:
        shard(objective, mesh, recipe.bf16)
    optimizer = adamw(model, recipe)
    batches = row_order(len(tokens), recipe.epochs, run.seed).split(recipe.batch)
    steps, saved = len(tokens) * recipe.epochs // recipe.batch, time.monotonic()
    done = load_checkpoint(checkpoint, model, optimizer, identity) if run.resume else 0
    for step in range(done, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.lr)
        batch, losses = batches[step], torch.zeros(len(exits), device=device)
        count = (labels[batch] != -100).sum().item()
        for part in batch[rank::ranks].split(recipe.micro_batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
                own = objective(tokens[part].to(device), labels[part].to(device), count=count)
            (own.mean() * ranks).backward()  # gradients are averaged over processes
            losses += own.detach()
        if mesh:
            torch.distributed.all_reduce(losses)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        due = time.monotonic() - saved > CHECKPOINT_SECONDS
        if from_rank_0(lambda due=due: due):
            save_checkpoint(checkpoint, model, optimizer, step + 1, identity)
            saved = time.monotonic()
        yield step + 1, losses


def fit_and_tell(model, exits, rows, recipe, run, distillation=None):
    """``fit`` to its end, with a line on stderr every ten seconds."""
    began = shown = time.monotonic()
    steps = len(rows[0]) * recipe.epochs // recipe.batch
    training = fit(model, exits, rows, recipe, run, distillation)
    for count, (step, losses) in enumerate(training, 1):
        if count == 1:
            tell(f"{run.out.name} on {placement(model)}")
        clock = time.monotonic()
        if clock - shown > 10 or step == steps:
            shown, speed = clock, count / (clock - began)
            by_exit = "  ".join(f"exit {e}: {loss:.3f}" for e, loss in zip(exits, losses.tolist()))
            line = f"{run.out.name} step {step}/{steps}  loss {by_exit}  "
            line += f"{speed * recipe.batch * recipe.length:.0f} tokens/s  "
            line += f"{(steps - step) / speed / 60:.1f} min left"
            tell(line)
