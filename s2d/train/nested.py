"""A sorted draft of any Llama: cut off its first layers, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import load_model, save_model
from ..checkpoint.config import read_config
from ..checkpoint.files import refuse_existing
from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import Tokenizer
from ..model import Drafting, Llama
from ..options import default_thresholds
from ..soft import Aim
from .dialogues import Counts, divide, join, read_dialogues
from .fit import Recipe, Rows, Run, fit, gather

# The corpus is in random order from the beginning, and the shipped miniatures learnt it in that.
MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3, shuffle_first=False)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(batch=128, micro_batch=2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)
RECIPES = {"mini": MINI, "a file": PAPER}  # by the data that a draft learns from


def train_soft(
    run: Run,
    init: Path,
    exits: tuple[int, ...],
    data: str,
    millions: float,
    all_text: bool = False,
    teacher: Path | None = None,
    align: float | None = None,
    **options: Any,
) -> None:
    """Train the draft that the command line asks for; ``options`` replace fields of its recipe."""
    if run.ranks == 1:
        refuse_existing(run.out)
    recipe = replace(RECIPES[data if data == "mini" else "a file"], **options)
    config = read_config(init)
    if list(exits) != sorted(set(exits)) or not 1 <= exits[0] <= exits[-1] <= layers_of(init):
        raise ValueError(f"exits must increase, from 1 to {layers_of(init)}, got {list(exits)}")
    if recipe.length > config.max_position_embeddings:
        raise ValueError(f"{init} has a context below {recipe.length} tokens; give --length")
    if teacher and read_config(teacher).vocab_size != config.vocab_size:
        raise ValueError(f"{teacher} has another vocabulary than {init}")
    tokenizer = Tokenizer(init, config.vocab_size)
    rows, counts = make_rows(tokenizer, data, run, recipe, millions, not all_text)
    model = cut(init, exits, run.device)
    aim = Aim(load_model(teacher, run.device, quick=False), align) if teacher else None
    learnt_from = data if data == "mini" else os.path.abspath(data)
    train_and_save(model, exits, rows, recipe, run, init, aim, learnt_from)
    tell(
        f"{run.out}: a draft with exits {', '.join(map(str, exits))}; it learnt from {data}, "
        f"{recipe.epochs} times {len(rows[0])} rows of {recipe.length} tokens, of which "
        f"{(rows[1] != -100).sum()} are learnt; {counts}"
    )


def layers_of(folder: Path) -> int:
    return read_config(folder).num_hidden_layers


def make_rows(
    tokenizer: Tokenizer,
    data: str,
    run: Run,
    recipe: Recipe,
    millions: float,
    answers_only: bool = True,
) -> tuple[Rows, Counts]:
    """Text for the Llama that has the ``tokenizer``: (tokens, labels), and what was left out.

    ``data`` is "mini", of which there are so many ``millions`` of tokens, or a file of dialogues,
    which is used whole. See ``divide`` for the rows, ``join`` for ``answers_only``.
    """
    count = None
    if data == "mini":
        count = round(millions * 1e6 / (recipe.batch * recipe.length)) * recipe.batch
    counts = Counts(tokenizer.prompt_format.name)
    dialogues = read_dialogues(data, run.seed, tokenizer, counts)
    pairs = (pair for _, rounds in dialogues for pair in rounds)
    tokens, labels = divide(*join(pairs, answers_only, recipe.length, enough=count), recipe.length)
    rows = tokens[:count], labels[:count]
    if len(rows[0]) < recipe.batch:
        found = f"{data} gives {len(tokens)} rows of {recipe.length} tokens"
        raise ValueError(f"{found}, and a batch needs {recipe.batch}; {counts}")
    return rows, counts


def cut(init: Path, exits: tuple[int, ...], device: str, drafting: Drafting | None = None) -> Llama:
    """The layers of the Llama in ``init`` up to the last of ``exits``, ready to learn."""
    model = load_model(init, device, "float32", quick=False, layers=exits[-1]).requires_grad_(True)
    drafting = drafting or Drafting(exits, default_thresholds(len(exits)))
    model.config = replace(model.config, drafting=drafting)
    return model


def train_and_save(
    model: Llama,
    exits: tuple[int, ...],
    rows: Rows,
    recipe: Recipe,
    run: Run,
    init: Path,
    aim: Aim | None = None,
    learnt_from: str | None = None,
) -> None:
    """Train ``exits`` of ``model``, then write it to ``run.out`` with the tokenizer in ``init``.

    config.json then says what data the model has ``learnt_from``.
    """
    for _ in fit(model, exits, rows, recipe, run, aim):
        pass  # it says itself how far it is
    whole = gather(model, run.mesh)
    if whole is not None:  # on rank 0
        save_model(whole, run.out, init, learnt_from=learnt_from)
        run.unfinished.unlink(missing_ok=True)
