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
from ..model import Llama
from ..notices import tell
from ..options import Drafting, default_thresholds
from ..speed.ranks import from_rank_0
from .dialogues import Counts, check_data, count_whole_rows, divide, join, read_pairs
from .distil import Distillation
from .fit import Recipe, Rows, Run, check_batch, fit, gather
from .self_text import find_ways_to_ask, sample

# The corpus is in random order from the beginning, and the shipped miniatures learnt it in that.
MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3, shuffle_first=False)
SELF = Recipe(batch=8, micro_batch=8, length=256, lr=6e-4, epochs=2, weight_decay=0.0)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(batch=128, micro_batch=2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)
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
    if any(value <= 0 for value in options.values()):
        raise ValueError(f"expected positive numbers, got {options}")
    recipe = replace(RECIPES[data if data in ("mini", "self") else "a file"], **options)
    from_rank_0(lambda: check(run, init, layers, exits, data, teacher, recipe))
    model = cut(init, exits, run.device)
    distillation = None
    if teacher is not None:
        distillation = Distillation(load_model(teacher, run.device, quick=False))
    tokenizer = Tokenizer(init, model.config.vocab_size)
    rows, counts = make_rows(tokenizer, data, run, recipe, millions)
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
    recipe: Recipe,
) -> None:
    """ValueError or FileNotFoundError for what cannot be run, before anything large is loaded."""
    refuse_existing(run.out)
    if list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != layers:
        raise ValueError(f"exits must increase and end with layer {layers}, got {list(exits)}")
    check_batch(recipe, run.ranks)
    config = read_config(init)
    if layers > config.num_hidden_layers:
        raise ValueError(f"{init} has {config.num_hidden_layers} layers, not {layers}")
    folders = [init]
    if teacher is not None:
        folders.append(teacher)
        if read_config(teacher).vocab_size != config.vocab_size:
            raise ValueError(f"{teacher} has another vocabulary than {init}")
    for folder in folders:
        if recipe.length > read_config(folder).max_position_embeddings:
            raise ValueError(f"{folder} has a context below {recipe.length} tokens; give --length")
    check_data(data)


def make_rows(
    tokenizer: Tokenizer,
    data: str,
    run: Run,
    recipe: Recipe,
    millions: float,
    answers_only: bool = True,
) -> tuple[Rows, Counts]:
    """Text for the Llama that has the ``tokenizer``: (tokens, labels), and what was left out.

    ``data`` is "mini", "self" or a file of dialogues; of the first two there are about so many
    ``millions`` of tokens. See ``divide`` for the rows, ``join`` for ``answers_only``.
    """
    count = count_rows(millions, recipe) if data == "mini" else None
    if data == "self":
        pairs, counts = sample(find_ways_to_ask(tokenizer), tokenizer, millions, run)
    else:
        counts = Counts(tokenizer.prompt_format.name)
        pairs = read_pairs(data, run.seed, tokenizer, counts)
    text, said = join(pairs, answers_only, recipe.length, enough=count)  # (N,) each
    tokens, labels = divide(text, said, recipe.length)
    whole = count_whole_rows(text, recipe.length)
    counts.left_out["rows without an answer left out"] = whole - len(tokens)
    if count is None:  # the corpus goes on without end
        counts.left_out["tokens left at the end that fill no row"] = (
            len(text) - whole * recipe.length
        )
    found = f"{data} gives {len(tokens)} rows of {recipe.length} tokens"
    if len(tokens) < recipe.batch:
        fits = suggest_batch(text, said, recipe, run.ranks)
        raise ValueError(f"{found}, and a batch needs {recipe.batch}; {fits}; {counts}")
    rows = tokens[:count], labels[:count]
    left = len(rows[0]) * recipe.epochs % recipe.batch
    counts.left_out["rows left at the end that fill no batch"] = left
    tell(f"{found}; {counts}")
    return rows, counts


def suggest_batch(text: Tensor, said: Tensor, recipe: Recipe, ranks: int) -> str:
    """Options with which a text (N,) too short for ``recipe`` fills a batch: with longest rows."""
    for halved in range(recipe.length.bit_length()):
        length = recipe.length >> halved
        rows = len(divide(text, said, length)[0]) // ranks * ranks
        if rows > 0:
            batch = min(rows, recipe.batch)
            return f"it fills one with --batch {batch} --micro-batch 1 --length {length}"
    return "no --batch and no --length can mend that"


def count_rows(millions: float, recipe: Recipe) -> int:
    """The rows, whole batches of ``recipe``, that so many ``millions`` of tokens fill."""
    batches = round(millions * 1e6 / (recipe.batch * recipe.length))
    if batches == 0:
        raise ValueError(f"{millions} million tokens do not fill a batch; give more --millions")
    return batches * recipe.batch


def cut(init: Path, exits: tuple[int, ...], device: str, drafting: Drafting | None = None) -> Llama:
    """The layers of the Llama in ``init`` up to the last of ``exits``, ready to learn."""
    model = load_model(init, device, "float32", quick=False, layers=exits[-1]).requires_grad_(True)
    model.drafting = drafting or Drafting(exits, default_thresholds(exits))
    return model


def train_and_save(
    model: Llama,
    exits: tuple[int, ...],
    rows: Rows,
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
    whole = gather(model, run.mesh)
    if whole is not None:  # on rank 0
        save_model(whole, run.out, init, learnt_from=learnt_from)
        shutil.rmtree(run.unfinished, ignore_errors=True)  # a short run has none
