"""A sorted draft of any Llama: cut off its first layers, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

import shutil
from dataclasses import replace

from ..files import refuse_existing
from ..model import Drafting
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import load_model, save_model
from .dialogues import dialogues_of, pack
from .distil import Distillation
from .fit import Recipe, fit, gathered
from .self_text import sample

MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3)
SELF = Recipe(batch=8, micro_batch=8, length=256, lr=6e-4, epochs=2, weight_decay=0.0)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a
# model that is already trained.
PAPER = Recipe(128, 2, length=2048, lr=2e-5, epochs=3, weight_decay=0.0)


def train_soft(run, init, layers, exits, data, millions, teacher=None, **options):
    """Train the draft that the command line asks for; ``options`` replace fields of its recipe."""
    refuse_existing(run.out)
    if run.checkpoints.exists() and not run.resume:
        raise ValueError(f"{run.checkpoints} is there already; go on with --resume, or remove it")
    if list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != layers:
        raise ValueError(f"exits must increase and end with layer {layers}, got {list(exits)}")
    given = {name: value for name, value in options.items() if value is not None}
    if min(given.values(), default=1) <= 0:
        raise ValueError(f"expected positive numbers, got {given}")
    recipe = replace({"mini": MINI, "self": SELF}.get(data, PAPER), **given)
    model, distillation = cut(init, exits, run.device), None
    if recipe.length > model.config.max_position_embeddings:
        raise ValueError(f"{init} has a context below {recipe.length} tokens; give --length")
    if teacher:
        distillation = Distillation(load_model(teacher, run.device))
        if distillation.teacher.config.vocab_size != model.config.vocab_size:
            raise ValueError(f"{teacher} has another vocabulary than {init}")
    rows = rows_of(init, data, run, recipe, millions)
    train_and_save(model, exits, rows, recipe, run, init, distillation)


def rows_of(init, data, run, recipe, millions, answers_only=True):
    """Text for the Llama in ``init``: (tokens, labels), (R, length) each, see ``pack``.

    ``data`` is "mini", "self" or a ShareGPT file; of the first two there are about so many
    ``millions`` of tokens.
    """
    rows = None
    if data == "mini":
        rows = round(millions * 1e6 / (recipe.batch * recipe.length)) * recipe.batch
    if data == "self":
        pairs = sample(init, millions, run)
    else:
        tokenizer, template = Tokenizer(init), chat_template(init)
        dialogues = dialogues_of(data, run.seed)
        pairs = (pair for each in dialogues for pair in tokenizer.rounds(each, template))
    tokens, labels = pack(pairs, rows, recipe.length, answers_only)
    if len(tokens) < recipe.batch:
        raise ValueError(f"{data} gives {len(tokens)} rows; one batch needs {recipe.batch}")
    return tokens, labels


def cut(init, exits, device, drafting=None):
    """The layers of the Llama in ``init`` up to the last of ``exits``, ready to learn."""
    model, layers = load_model(init, device, "float32", quick=False).requires_grad_(True), exits[-1]
    if layers > model.config.num_hidden_layers:
        raise ValueError(f"{init} has {model.config.num_hidden_layers} layers, not {layers}")
    del model.model.layers[layers:]
    model.config = replace(model.config, num_hidden_layers=layers)
    if drafting is None:
        drafting = Drafting(exits, thresholds=(0.5,) * (len(exits) - 1) + (0.0,))  # the paper's
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
