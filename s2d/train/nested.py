"""A sorted draft of any Llama: cut off its first layers, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import load_model, save_model
from ..checkpoint.config import read_config
from ..checkpoint.names import find_target
from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import Tokenizer
from ..model import Drafting, Llama
from ..options import default_thresholds
from .data import make_rows, read_pairs, refuse_missing
from .fit import Recipe, Run, fit
from .fsdp import Divided
from .teacher import Teacher
from .thresholds import hold_out, measure_thresholds

# The corpus is in random order from the beginning, and the shipped miniatures learnt it in that.
MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3, shuffle_first=False)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(batch=128, micro_batch=2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)


def train_soft(
    run: Run,
    init: str,
    exits: tuple[int, ...],
    data: str,
    millions: float,
    all_text: bool = False,
    teacher: str | None = None,
    align: float | None = None,
    **options: Any,
) -> None:
    """Train the draft that the command line asks for; ``options`` replace fields of its recipe."""
    recipe = replace(MINI if data == "mini" else PAPER, **options)
    run.refuse(recipe)
    refuse_missing(data)
    folder = find_target(init)
    refuse_models(recipe, folder, exits, teacher and find_target(teacher), align)
    tokenizer = Tokenizer(folder, read_config(folder).vocab_size)
    pairs = read_pairs(data, run.seed, tokenizer, not all_text)
    enough = millions if data == "mini" else None
    rows, held_out = hold_out(make_rows(pairs, recipe.batch, recipe.length, enough))
    drafting = Drafting(exits, default_thresholds(len(exits)))
    model = Divided(cut(folder, exits[-1], run.device))
    tutor = None
    if teacher is not None:
        tutor = Teacher(load_model(find_target(teacher), run.device, quick=False), align)
    for _ in fit(model, exits, rows, recipe, run, tutor):
        pass  # it says itself how far it is
    if len(held_out[0]) > 0:
        drafting = replace(drafting, thresholds=measure_thresholds(model, held_out, exits))
    save_trained(model, drafting, run, folder)
    learnt = f"{(rows[1] != -100).sum()} tokens of {len(rows[0])} rows"
    tell(f"{run.out}: it learnt {learnt}, {recipe.epochs} times; exits {exits}")
    tell(f"thresholds {drafting.thresholds}, measured on {len(held_out[0])} rows")


def refuse_models(
    recipe: Recipe, folder: Path, exits: tuple[int, ...], teacher: Path | None, align: float | None
) -> None:
    """Raise ValueError, before they are loaded, for models that do not go together."""
    config = read_config(folder)
    layers = config.num_hidden_layers
    if list(exits) != sorted(set(exits)) or not 1 <= exits[0] <= exits[-1] <= layers:
        raise ValueError(f"exits must increase, from 1 to {layers}, got {list(exits)}")
    for each in filter(None, (folder, teacher)):
        if recipe.length > read_config(each).max_position_embeddings:
            raise ValueError(f"{each} has a context below {recipe.length} tokens; give --length")
    if teacher is None and align is not None:
        raise ValueError("--align is about the features of a --teacher; give both")
    if teacher is not None and read_config(teacher).vocab_size != config.vocab_size:
        raise ValueError(f"{teacher} has another vocabulary than {folder}")
    if align is not None and read_config(teacher).hidden_size != config.hidden_size:
        raise ValueError(f"--align needs a teacher as wide as {folder}, which {teacher} is not")


def cut(folder: Path, layers: int, device: str) -> Llama:
    """The first ``layers`` of the Llama in ``folder``, ready to learn."""
    model = load_model(folder, device, "float32", quick=False, layers=layers)
    return model.requires_grad_(True)


def save_trained(model: Divided, drafting: Drafting | None, run: Run, tokenizer_from: Path) -> None:
    """Write a trained model to ``run.out``, and how it drafts. No checkpoint is left."""
    whole = model.gather()
    if whole is not None:  # on rank 0
        whole.config = replace(whole.config, drafting=drafting)
        save_model(whole, run.out, tokenizer_from)
        run.unfinished.unlink(missing_ok=True)
