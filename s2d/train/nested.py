"""A sorted draft of any Llama: cut off its first layers, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

import shutil
from dataclasses import replace
from pathlib import Path

from ..cli.program import progress
from ..extras.tensor_parallel import from_rank_0
from ..files import refuse_existing
from ..model import Drafting, default_thresholds
from ..text.tokenizer import Tokenizer
from ..weights import load_model, save_model
from ..weights.config import read_config
from .dialogues import dialogues_of, pack, pairs_of
from .distil import Distillation
from .fit import Recipe, check_batch, fit, gathered
from .self_text import sample

# The corpus is in random order from the beginning, and the shipped miniatures learnt it in that.
MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3, shuffle_first=False)
SELF = Recipe(batch=8, micro_batch=8, length=256, lr=6e-4, epochs=2, weight_decay=0.0)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(128, 2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)


def train_soft(run, init, layers, exits, data, millions, teacher=None, **options):
    """Train the draft that the command line asks for; ``options`` replace fields of its recipe."""
    recipe = from_rank_0(lambda: check(run, init, layers, exits, data, teacher, options))
    model, distillation = cut(init, exits, run.device), None
    if teacher:
        distillation = Distillation(load_model(teacher, run.device, quick=False))
    rows = rows_of(init, data, run, recipe, millions, vocab_size=model.config.vocab_size)
    train_and_save(model, exits, rows, recipe, run, init, distillation)


def check(run, init, layers, exits, data, teacher, options):
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
    recipe = replace({"mini": MINI, "self": SELF}.get(data, PAPER), **given)
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
    if data not in ("mini", "self") and not Path(data).is_file():
        raise FileNotFoundError(f"no file {data}; --data is mini, self or a ShareGPT file")
    return recipe


def rows_of(init, data, run, recipe, millions, answers_only=True, vocab_size=None):
    """Text for the Llama in ``init``: (tokens, labels), (R, length) each, see ``pack``.

    ``data`` is "mini", "self" or a ShareGPT file; of the first two there are about so many
    ``millions`` of tokens. Dialogues with tokens beyond a ``vocab_size`` are passed over.
    """
    rows = row_count(millions, recipe) if data == "mini" else None
    if data == "self":
        pairs = sample(init, millions, run)
    else:
        dialogues = progress(dialogues_of(data, run.seed), f"reading {data}: dialogues")
        pairs = pairs_of(dialogues, Tokenizer(init, vocab_size))
    tokens, labels = pack(pairs, rows, recipe.length, answers_only)
    if len(tokens) < recipe.batch:
        raise ValueError(f"{data} gives {len(tokens)} rows; one batch needs {recipe.batch}")
    return tokens, labels


def row_count(millions, recipe):
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


def train_and_save(model, exits, rows, recipe, run, init, distillation=None):
    """Train ``exits`` of ``model``, then write it to ``run.out`` with the tokenizer in ``init``."""
    for _ in fit(model, exits, rows, recipe, run, distillation):
        pass  # it says itself how far it is
    whole = gathered(model, run.mesh)
    if whole:  # on rank 0
        save_model(whole, run.out, init)
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # a short run has none
        run.answers.unlink(missing_ok=True)
