"""A sorted draft from the first layers of any Llama: cut them off, train all exits together, save.

Sorted fine-tuning, SoFT (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4).
"""

import shutil
import sys
from collections import Counter
from dataclasses import replace

import torch

from ..chat import chat_template
from ..files import check_free
from ..tokenizer import Tokenizer
from ..weights import load_model, placement, save_adapter, save_model
from .dialogues import corpus_dialogues, one_a_row, pack, read_sharegpt, report_skipped
from .distributed import gathered
from .fit import Recipe, check_not_lost, fit, show_progress
from .lora import SCALE, adapter_pairs, add_adapters
from .self_text import likeliest, sample_to

MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3)
SELF = Recipe(batch=8, micro_batch=8, length=256, lr=6e-4, epochs=2, weight_decay=0.0)
ADAPTER_LR = 1.5e-3  # of adapters, which bear more than whole weights do
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a model already trained.
PAPER = Recipe(
    batch=128, micro_batch=4, length=2048, lr=2e-5, epochs=3, weight_decay=0.0, recompute=True
)


def corpus_rows(millions, recipe):
    """How many rows, in whole batches, about so many million tokens make."""
    least = recipe.batch * recipe.length / 1e6
    if not least <= millions < 1e6:
        raise ValueError(
            f"expected at least {least:g} million tokens, one batch, and less than 1e+06; got {millions:g}"
        )
    return round(millions * 1e6 / (recipe.batch * recipe.length)) * recipe.batch


def train_soft(
    init, layers, exits, data, out, device, recipe, millions, seed, resume, drafting=None, distillation=None, mesh=None,
    text=None, rank=None, keep=None,
):  # fmt: skip
    """Cut the first ``layers`` from ``init`` and fine-tune all ``exits`` together on the assistant's words.

    ``data`` is "mini", "self" (with the file ``text``) or a ShareGPT file. ``drafting`` are the draft's defaults that its
    config is to carry; the paper's thresholds unless given. With a ``rank`` only adapters are learnt, and saved. The draft
    drafts only the ``keep`` most frequent tokens of its training text, if that is given.
    """
    tokens, labels = rows_of(init, data, device, recipe, millions, seed, text)
    if len(tokens) < recipe.batch:
        raise ValueError(
            f"{data} gives {len(tokens)} rows of {recipe.length} tokens; one batch needs {recipe.batch}"
        )
    model = load_model(init, device, "float32", num_layers=layers).requires_grad_(True)
    drafting = drafting or {"thresholds": (0.5,) * (len(exits) - 1) + (0.0,)}
    model.config = replace(model.config, exit_layers=exits, **drafting)
    if keep:
        model.keep_tokens(most_frequent(labels, keep, model.config.vocab_size))
        labels = among(model.draft_vocabulary.cpu(), labels, model.config.vocab_size)
    if rank:
        add_adapters(model, rank, seed)
    train_and_save(
        model, exits, tokens, labels, recipe, out, init, resume, seed, distillation, mesh
    )


def rows_of(init, data, device, recipe, millions, seed, text):
    """Training text as (tokens, labels), (R, length) each."""
    tokenizer, template = Tokenizer(init), chat_template(init)
    if data == "self":
        target = load_model(init, device, "bfloat16")
        records = sample_to(text, target, tokenizer, template, millions * 1e6, seed).records
        tokens, labels = one_a_row(
            [(record["p"], record["a"]) for record in records], recipe.length
        )
        return tokens, likeliest(target, tokens, labels)
    skipped = Counter()
    dialogues = corpus_dialogues(seed) if data == "mini" else read_sharegpt(data, skipped)
    rows = corpus_rows(millions, recipe) if data == "mini" else None
    packed = pack(dialogues, tokenizer, rows, recipe.length, answers_only=True, template=template)
    report_skipped(skipped)
    return packed


def most_frequent(labels, count, vocab_size):
    """The ``count`` tokens that occur most often among ``labels``, in order of their ids."""
    if not 1 <= count <= vocab_size:
        raise ValueError(f"a draft vocabulary has from 1 to {vocab_size} tokens, got {count}")
    return (
        labels[labels >= 0]
        .bincount(minlength=vocab_size)
        .argsort(descending=True, stable=True)[:count]
        .sort()
        .values
    )


def among(kept, labels, vocab_size):
    """``labels`` by their places among the ``kept`` tokens (K,); what is not among them is not learnt, and counted."""
    places = torch.full((vocab_size + 1,), -100, dtype=torch.int32)
    places[kept] = torch.arange(len(kept), dtype=torch.int32)
    found = places[labels.where(labels >= 0, vocab_size)]
    learnt, left_out = (labels >= 0).sum().item(), ((labels >= 0) & (found < 0)).sum().item()
    print(
        f"draft vocabulary: {left_out / max(1, learnt):.1%} of {learnt} tokens are outside",
        file=sys.stderr,
    )
    return found


def train_and_save(
    model, exits, tokens, labels, recipe, out, init, resume, seed, distillation=None, mesh=None
):
    """``fit``, shown as it goes on; then the model is written to ``out`` and its checkpoint is no longer needed.

    ``init`` is the folder it comes from: its tokenizer is copied along, or, of an adapter, it is the base.
    """
    checkpoint = checkpoint_of(out)
    training = fit(
        model, exits, tokens, labels, recipe, checkpoint, resume, seed, distillation, mesh
    )
    steps = len(tokens) * recipe.epochs // recipe.batch
    show_progress(out.name, placement(model), exits, steps, recipe.batch * recipe.length, training)
    if pairs := adapter_pairs(model):
        save_adapter(model, pairs, SCALE, out, init)
    elif whole := gathered(model, mesh):
        save_model(whole, out, init)
    if mesh is None or mesh.get_local_rank() == 0:
        shutil.rmtree(checkpoint, ignore_errors=True)


def checkpoint_of(out):
    return out.with_name(out.name + ".checkpoint")


def check_out(out, resume):
    """Raise ValueError where a training to ``out`` could not be saved, or would cost what another has left there."""
    check_free(out)
    check_not_lost(checkpoint_of(out), resume)
