"""A sorted draft from the first layers of any Llama: cut them off, train all exits together, save. Arguments checked.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

import shutil
from collections import Counter
from dataclasses import replace

from ..files import check_free
from ..tokenizer import Tokenizer, chat_template
from ..weights import load_model, placement, save_model
from .dialogues import corpus_dialogues, pack, read_sharegpt, report_skipped
from .distributed import gathered
from .fit import Recipe, check_not_lost, fit, show_progress

MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a model already trained.
PAPER = Recipe(batch=128, micro_batch=4, length=2048, lr=2e-5, epochs=3, weight_decay=0.0, recompute=True)


def corpus_rows(millions, recipe):
    """How many rows, in whole batches, about so many million tokens make."""
    least = recipe.batch * recipe.length / 1e6
    if not least <= millions < 1e6:
        raise ValueError(f"expected at least {least:g} million tokens, one batch, and less than 1e+06; got {millions:g}")
    return round(millions * 1e6 / (recipe.batch * recipe.length)) * recipe.batch


def train_soft(
    init, layers, exits, data, out, device, recipe, millions, seed, resume, drafting=None, distillation=None, mesh=None
):
    """Cut the first ``layers`` from ``init`` and fine-tune all ``exits`` together on the assistant's words.

    ``drafting`` are the draft's defaults that its config is to carry; the paper's thresholds unless given.
    """
    model = load_model(init, device, "float32", num_layers=layers).requires_grad_(True)
    drafting = drafting or {"thresholds": (0.5,) * (len(exits) - 1) + (0.0,)}
    model.config = replace(model.config, exit_layers=exits, **drafting)
    tokenizer, skipped = Tokenizer(init), Counter()
    dialogues = corpus_dialogues(seed) if data == "mini" else read_sharegpt(data, skipped)
    rows = corpus_rows(millions, recipe) if data == "mini" else None
    tokens, labels = pack(dialogues, tokenizer, rows, recipe.length, answers_only=True,
                          template=chat_template(init))  # fmt: skip
    report_skipped(skipped)
    if len(tokens) < recipe.batch:
        raise ValueError(f"{data} gives {len(tokens)} rows of {recipe.length} tokens; one batch needs {recipe.batch}")
    train_and_save(model, exits, tokens, labels, recipe, out, init, resume, seed, distillation, mesh)


def train_and_save(model, exits, tokens, labels, recipe, out, tokenizer_from, resume, seed, distillation=None, mesh=None):
    """``fit``, shown as it goes on; then the model is written to ``out`` and its checkpoint is no longer needed."""
    checkpoint = checkpoint_of(out)
    training = fit(model, exits, tokens, labels, recipe, checkpoint, resume, seed, distillation, mesh)
    steps = len(tokens) * recipe.epochs // recipe.batch
    show_progress(out.name, placement(model), exits, steps, recipe.batch * recipe.length, training)
    if whole := gathered(model, mesh):
        save_model(whole, out, tokenizer_from)
        shutil.rmtree(checkpoint, ignore_errors=True)


def checkpoint_of(out):
    return out.with_name(out.name + ".checkpoint")


def check_out(out, resume):
    """Raise ValueError where a training to ``out`` could not be saved, or would cost what another has left there."""
    check_free(out)
    check_not_lost(checkpoint_of(out), resume)
