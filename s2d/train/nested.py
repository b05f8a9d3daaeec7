"""A sorted draft of any Llama: cut off its first layers, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import empty_model, load_model, save_model
from ..checkpoint.config import default_thresholds, read_folder
from ..checkpoint.files import refuse_existing
from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import Tokenizer
from ..model import Drafting
from ..pair.names import find_target
from .data import make_rows, read_pairs, read_records
from .fit import Recipe, Run, fit
from .fsdp import Divided, count_ranks
from .teacher import load_teacher
from .thresholds import FEWEST, hold_out, measure_thresholds

MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3, millions=1.5)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(batch=128, micro_batch=2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)


def train_soft(run: Run, data: str = "mini", resume: bool = False, **options: Any) -> None:
    """Train a sorted draft and write it to ``run.out``.

    ``options`` are fields of the recipe, ``init`` and ``exits`` at least. The others are those of
    MINI or, if ``data`` is a file, of PAPER. A teacher's loss takes the place of the recipe's.
    Raises ValueError or OSError for what cannot be trained.
    """
    recipe = replace(MINI if data == "mini" else PAPER, data=data, **options)
    exits = recipe.exits
    if resume and run.out.exists():
        raise ValueError(f"{run.out} is finished")
    refuse_existing(run.out)
    if resume != run.unfinished.exists():
        raise ValueError(f"give --resume if {run.unfinished} is there, and only then")
    if not resume:
        refuse_existing(run.losses)
    if recipe.batch % count_ranks():
        raise ValueError(f"--batch is no multiple of the {count_ranks()} processes")
    records = read_records(data, run.seed)
    folder = read_folder(find_target(recipe.init))
    if not exits or list(exits) != sorted(set(exits)) or exits[0] < 1:
        raise ValueError(f"exits must increase, from 1, got {list(exits)}")
    if len(recipe.weights) not in (0, len(exits)):
        raise ValueError(f"--weights: expected one for each of {len(exits)} exits")
    most = folder.config.max_position_embeddings
    if recipe.length > most:
        raise ValueError(f"{folder.path} has a context of {most} tokens; give --length {most}")
    if recipe.align is not None and recipe.teacher is None:
        raise ValueError("--align is about the features of a --teacher; give both")
    first = load_model(folder, run.device, "float32", quick=False, layers=exits[-1])
    model = Divided(first)
    if recipe.teacher is not None:
        teacher = load_teacher(recipe.teacher, recipe.align, folder.config, run.device)
        recipe = replace(recipe, loss=teacher.losses)
    tokenizer = Tokenizer(folder.path, folder.config.vocab_size)
    eos = folder.config.eos_token_ids
    ends = [tokenizer.special.get(each) or tokenizer.decode([each]) for each in eos]
    pairs = read_pairs(data, records, tokenizer, not recipe.all_text, ends)
    rows = make_rows(pairs, recipe.batch, recipe.length, recipe.millions)
    pairs.close()  # now it tells what was passed over
    learnt, held_out = hold_out(rows, recipe.batch)
    if not torch.isin(learnt[1], torch.tensor(eos, dtype=torch.int32)).any():
        tell(f"{data}: no answer ends with an EOS of {folder.path}, so no end is learnt")
    for _ in fit(model, learnt, recipe, run):
        pass  # it says itself how far it is
    held = (held_out[1] != -100).sum().item()
    if held < FEWEST:
        drafting = Drafting(exits, default_thresholds(len(exits)))
        how = f"not measured, as the rows held out have {held} tokens of at least {FEWEST}"
    else:
        drafting = Drafting(exits, model(measure_thresholds, held_out, exits))
        how = f"measured on {held} tokens"
    save_trained(model, drafting, run, folder.path)
    steps = len(learnt[0]) * recipe.epochs // recipe.batch
    count = (learnt[1] != -100).sum()
    there = f"{len(learnt[0])} rows with {count} tokens to learn"
    tell(f"{run.out}: {steps} steps of {recipe.batch} rows, from {there}")
    tell(f"exits {exits}, thresholds {drafting.thresholds}, {how}")


def save_trained(model: Divided, drafting: Drafting | None, run: Run, tokenizer_from: Path) -> None:
    """Write a trained model to ``run.out``, and how it drafts. No checkpoint is left."""
    weights = model.gather()
    if weights:  # on rank 0
        whole = empty_model(replace(model.model.config, drafting=drafting))
        whole.load_state_dict(weights, assign=True)
        save_model(whole, run.out, tokenizer_from)
        run.unfinished.unlink(missing_ok=True)
