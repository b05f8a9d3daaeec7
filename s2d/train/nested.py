"""A sorted draft of any Llama: cut off its first layers, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint import load_model, save_model
from ..checkpoint.config import read_config
from ..checkpoint.tokenizer import Tokenizer
from ..files import refuse_existing
from ..model import Drafting, Llama, default_thresholds
from ..notices import tell
from ..speed.ranks import from_rank_0
from .dialogues import Counts, check_data, divide, join, pairs_of
from .distil import Distillation
from .fit import Recipe, Run, check_batch, fit, gathered
from .self_text import question_count, sample

# The corpus is in random order from the beginning, and the shipped miniatures learnt it in that.
MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3, shuffle_first=False)
SELF = Recipe(batch=8, micro_batch=8, length=256, lr=6e-4, epochs=2, weight_decay=0.0)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(128, 2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)
RECIPES = {"mini": MINI, "self": SELF, "a file": PAPER}  # by the data that a draft learns from


def train_soft(
    run: Run,
    init: Path,
    layers: int,
    exits: tuple[int, ...],
    data: str,
    millions: float,
    teacher: Path | None = None,
    **options: Any,
) -> None:
    """Train the draft that the command line asks for; ``options`` replace fields of its recipe."""
    recipe = from_rank_0(lambda: check(run, init, layers, exits, data, teacher, options))
    model, distillation, counts = cut(init, exits, run.device), None, Counts()
    if teacher:
        distillation = Distillation(load_model(teacher, run.device, quick=False))
    vocab_size = model.config.vocab_size
    rows = rows_of(init, data, run, recipe, millions, counts, vocab_size=vocab_size)
    counts.rows_left = len(rows[0]) * recipe.epochs % recipe.batch
    learnt_from = data if data in ("mini", "self") else os.path.abspath(data)
    train_and_save(model, exits, rows, recipe, run, init, distillation, learnt_from)
    tokens, labels = rows
    tell(
        f"{run.out}: a draft with exits {', '.join(map(str, exits))}; it learnt from {data}, "
        f"{recipe.epochs} times {len(tokens)} rows of {recipe.length} tokens, of which "
        f"{(labels != -100).sum()} belong to answers; {counts}"
    )


def check(
    run: Run,
    init: Path,
    layers: int,
    exits: tuple[int, ...],
    data: str,
    teacher: Path | None,
    options: dict[str, Any],
) -> Recipe:
    """The recipe; ValueError or FileNotFoundError for what cannot be run, before it is loaded."""
    refuse_existing(run.out)
    for kept in (run.checkpoints, run.answers):
        if kept.exists() and not run.resume:
            raise ValueError(f"{kept} is there already; go on with --resume, or remove it")
    if list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != layers:
        raise ValueError(f"exits must increase and end with layer {layers}, got {list(exits)}")
    given = {name: value for name, value in options.items() if value is not None}
    if min(given.values(), default=1) <= 0:
        raise ValueError(f"expected positive numbers, got {given}")
    recipe = replace(RECIPES.get(data, RECIPES["a file"]), **given)
    check_batch(recipe, run.mesh.size() if run.mesh else 1)
    config = read_config(init)
    if layers > config.num_hidden_layers:
        raise ValueError(f"{init} has {config.num_hidden_layers} layers, not {layers}")
    if recipe.length > config.max_position_embeddings:
        raise ValueError(f"{init} has a context below {recipe.length} tokens; give --length")
    if teacher and read_config(teacher).vocab_size != config.vocab_size:
        raise ValueError(f"{teacher} has another vocabulary than {init}")
    if teacher and recipe.length > read_config(teacher).max_position_embeddings:
        raise ValueError(f"{teacher} has a context below {recipe.length} tokens; give --length")
    check_data(data)
    return recipe


def rows_of(
    init: Path,
    data: str,
    run: Run,
    recipe: Recipe,
    millions: float,
    counts: Counts,
    answers_only: bool = True,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Text for the Llama in ``init``: (tokens, labels), (R, length) each, see ``divide``.

    ``data`` is "mini", "self" or a file of dialogues; of the first two there are about so many
    ``millions`` of tokens. Dialogues with tokens beyond a ``vocab_size`` are passed over. What is
    left out is added to ``counts``.
    """
    count = row_count(millions, recipe) if data == "mini" else None
    if data == "self":
        pairs = sample(init, millions, run)
        counts.chat_format = "the folder's own chat template"
        counts.dialogues = len(pairs)
        counts.passed_over["questions without an end"] = question_count(millions) - len(pairs)
    else:
        pairs = pairs_of(data, run.seed, Tokenizer(init, vocab_size), counts)
    tokens, labels = join(pairs, answers_only, enough=count and count * recipe.length)
    rows = divide(tokens, labels, recipe.length)
    whole = max(0, len(tokens) - 1) // recipe.length
    counts.rows_without_answers = whole - len(rows[0])
    if count is None:
        counts.tokens_left = len(tokens) - whole * recipe.length
    found = f"{data} gives {len(rows[0])} rows of {recipe.length} tokens"
    if len(rows[0]) < recipe.batch:
        fits = what_fits(tokens, labels, recipe, run)
        raise ValueError(f"{found}, and a batch needs {recipe.batch}; {fits}; {counts}")
    tell(f"{found}; {counts}")
    return rows[0][:count], rows[1][:count]


def what_fits(tokens: Tensor, labels: Tensor, recipe: Recipe, run: Run) -> str:
    """Options with which a text (N,) too short for ``recipe`` fills a batch: with longest rows."""
    ranks = run.mesh.size() if run.mesh else 1
    length = recipe.length
    while length > 0:
        batch = len(divide(tokens, labels, length)[0]) // ranks * ranks
        if batch > 0:
            batch = min(batch, recipe.batch)
            return f"it fills one with --batch {batch} --micro-batch 1 --length {length}"
        length //= 2
    return "no --batch and no --length can mend that"


def row_count(millions: float, recipe: Recipe) -> int:
    """The rows, whole batches of ``recipe``, that so many ``millions`` of tokens fill."""
    batches = round(millions * 1e6 / (recipe.batch * recipe.length))
    if batches == 0:
        raise ValueError(f"{millions} million tokens do not fill a batch; give more --millions")
    return batches * recipe.batch


def cut(init, exits, device, drafting=None):
    """The layers of the Llama in ``init`` up to the last of ``exits``, ready to learn."""
    model = load_model(init, device, "float32", quick=False, layers=exits[-1]).requires_grad_(True)
    if drafting is None:
        drafting = Drafting(exits, default_thresholds(exits))
    model.drafting = drafting
    return model


def train_and_save(
    model: Llama,
    exits: tuple[int, ...],
    rows: tuple[Tensor, Tensor],
    recipe: Recipe,
    run: Run,
    init: Path,
    distillation: Distillation | None = None,
    learnt_from: str | None = None,
) -> None:
    """Train ``exits`` of ``model``, then write it to ``run.out`` with the tokenizer in ``init``.

    config.json then says what data the model has ``learnt_from``.
    """
    for _ in fit(model, exits, rows, recipe, run, distillation):
        pass  # it says itself how far it is
    whole = gathered(model, run.mesh)
    if whole:  # on rank 0
        save_model(whole, run.out, init, learnt_from=learnt_from)
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # a short run has none
        run.answers.unlink(missing_ok=True)
