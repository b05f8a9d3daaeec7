"""Training a Llama's exits by AdamW, on one process or several, with checkpoints. Knows nothing about text."""

import math
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ..files import former_of
from ..parallel import from_rank_0
from ..weights import checksum
from .distributed import Objective, add_up, load_checkpoint, save_checkpoint, shard
from .soft import soft_losses

CHECKPOINT_SECONDS = 120


@dataclass(frozen=True)
class Recipe:
    """How to train. ``batch`` rows make a step, over all processes; ``micro_batch`` of them go through the model at once."""

    batch: int
    micro_batch: int
    length: int  # tokens of a row
    lr: float  # at its peak
    epochs: int = 1
    weight_decay: float = 0.1
    recompute: bool = False  # activation checkpointing
    bf16: bool = (
        True  # matrix products under autocast; weights, gradients and AdamW stay in float32
    )


def learning_rate(step, steps, peak, warmup=0.04):
    """Linear warm-up over the first 4 % of the steps, then a cosine down to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1, round(warmup * steps)))
    return peak * rising * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def row_order(rows, epochs, seed):
    """Which row comes when: in their own order first, then shuffled anew for every further epoch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat(
        [
            torch.arange(rows),
            *(torch.randperm(rows, generator=generator) for _ in range(epochs - 1)),
        ]
    )


def training_identity(model, exits, tokens, labels, recipe, seed, distillation):
    """What a training is made of, as far as it changes the losses: whoever resumes it must bring the same."""
    data = zlib.crc32(labels.numpy().tobytes(), zlib.crc32(tokens.numpy().tobytes()))
    teacher = distillation and {"teacher": checksum(distillation.teacher), "kd": distillation.kind,
                                "kd weight": distillation.weight}  # fmt: skip
    settings = {
        name: value
        for name, value in asdict(recipe).items()
        if name not in ("micro_batch", "recompute")
    }
    return {"model": checksum(model), "exits": list(exits), "data": f"{data:08x}", "seed": seed, **settings,
            **(teacher or {"teacher": None})}  # fmt: skip


def check_not_lost(checkpoint, resume):
    """Raise ValueError where a new training would write over the ``checkpoint`` of one that was cut short."""
    if not resume and any(path.exists() for path in (checkpoint, former_of(checkpoint))):
        raise ValueError(
            f"{checkpoint} is of a training that was cut short; go on with --resume, or remove it"
        )


def fit(
    model,
    exits,
    tokens,
    labels,
    recipe,
    checkpoint,
    resume=False,
    seed=0,
    distillation=None,
    mesh=None,
):
    """Train ``model`` in place, all ``exits`` together; yields (step, losses (E,)) after each step.

    AdamW. On a ``mesh`` every process takes its rows of each step, and weights, gradients and AdamW's state are divided
    among them (distributed.py). The loss is the mean over all labelled tokens of a step, however they are divided. A
    checkpoint is kept while training lasts, from which ``resume`` goes on to the same losses as an uninterrupted run.
    Raises ValueError where that is another training's, or where it would be lost because ``resume`` is not asked for.
    """
    identity = training_identity(model, exits, tokens, labels, recipe, seed, distillation)
    check_not_lost(checkpoint, resume)
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
    if recipe.batch % (ranks * recipe.micro_batch):
        raise ValueError(
            f"a batch of {recipe.batch} rows cannot be divided among {ranks} processes by {recipe.micro_batch} rows"
        )
    objective = Objective(
        model,
        partial(soft_losses, exits=exits, distillation=distillation, recompute=recipe.recompute),
    )
    if mesh:
        shard(objective, mesh, recipe.bf16)
    learning = [p for p in model.parameters() if p.requires_grad]
    decayed, others = [p for p in learning if p.dim() == 2], [p for p in learning if p.dim() != 2]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)
    order, device = row_order(len(tokens), recipe.epochs, seed), model.device
    steps, saved = len(order) // recipe.batch, time.monotonic()
    step = load_checkpoint(checkpoint, model, optimizer, identity) if resume else 0
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.lr)
        rows = order[step * recipe.batch : (step + 1) * recipe.batch]
        count, losses = (labels[rows] != -100).sum().item(), torch.zeros(len(exits), device=device)
        for part in rows[rank::ranks].split(recipe.micro_batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
                share = objective(tokens[part].to(device), labels[part].to(device), count=count)
            (share.mean() * ranks).backward()  # gradients are averaged over processes
            losses += share.detach()
        if mesh:
            add_up(losses)
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if from_rank_0(lambda: time.monotonic() - saved > CHECKPOINT_SECONDS):  # noqa: B023 - called at once
            save_checkpoint(checkpoint, model, optimizer, step, identity)
            saved = time.monotonic()
        yield step, losses


def show_progress(name, where, exits, steps, tokens_a_step, training):
    """Run ``training`` (what ``fit`` returns) to its end, with a line on stderr every ten seconds; the first says ``where``."""
    began = shown = time.monotonic()
    for count, (step, losses) in enumerate(training, 1):
        if count == 1:
            print(f"{name} on {where}", file=sys.stderr, flush=True)
        now = time.monotonic()
        if now - shown > 10 or step == steps:
            shown, speed = now, count / (now - began)
            per_exit = "  ".join(f"exit {e}: {loss:.3f}" for e, loss in zip(exits, losses.tolist()))
            print(f"{name} step {step}/{steps}  loss {per_exit}  {speed * tokens_a_step:.0f} tokens/s  "
                  f"{(steps - step) / speed / 60:.1f} min left", file=sys.stderr, flush=True)  # fmt: skip
