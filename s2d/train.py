"""Training: the miniature family from nothing (``mini``), or a nested draft from any Llama folder (``soft``).

    python -m s2d.train mini --out family
    python -m s2d.train soft --init weights/mini-7b --layers 4 --exits 2,3,4 --data mini --out draft
"""

import argparse
import io
import json
import math
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import sentencepiece
import torch

from . import parallel
from .corpus import conversations
from .decode import choose_exits
from .dialogues import corpus_dialogues, pack, read_sharegpt, report_skipped
from .files import check_free
from .fit import Recipe, check_not_lost, fit, show_progress
from .model import Llama, LlamaConfig
from .program import Parser, run_program
from .soft import Distillation
from .tokenizer import VICUNA_SYSTEM, Tokenizer, chat_template
from .weights import check_device, load_model, save_model
from .weights.config import read_config

VOCAB_SIZE = 1024


def initialise(config, seed, copying):
    """A fresh Llama whose heads begin by attending to similar tokens and handing on what they see there.

    Every query weight starts near its key weight, every output weight as its value weight transposed, the LM head as
    the embedding: after the mimetic initialisation of Trockman and Kolter 2023 (arXiv 2305.09828, section 3). From
    independent weights models this small need several times as much text before they look things up in the prompt.
    With ``copying``, attention starts almost flat and its values orthogonal, and what it hands on outweighs the token
    itself: a deep model with few KV heads then copies words from the prompt from the first steps on.
    """
    torch.manual_seed(seed)
    model = Llama(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    into_residual = (2 * config.num_hidden_layers) ** -0.5
    # Part of the query stays random, or heads that share a key would stay the same for ever.
    own, like_key, handed_on = (0.25, 0.35, 3.6) if copying else (0.5, 1.4, into_residual)

    def for_each_head(weight):  # (G * D, hidden) -> (H * D, hidden)
        by_group = weight.view(config.num_key_value_heads, config.head_dim, -1)
        return by_group.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0).flatten(0, 1)

    blocks, width, rows = model.model["layers"], config.hidden_size, config.num_key_value_heads * config.head_dim
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model["embed_tokens"].weight)
        if copying:  # where values have fewer dimensions than tokens, neighbouring layers get different ones
            orthogonal = torch.cat([torch.nn.init.orthogonal_(torch.empty(width, width)) for _ in blocks])
            for block, values in zip(blocks, orthogonal.split(rows)):
                block.self_attn.v_proj.weight.copy_(values)
        for block in blocks:
            attention = block.self_attn
            attention.q_proj.weight.mul_(own).add_(for_each_head(attention.k_proj.weight), alpha=like_key)
            attention.o_proj.weight.copy_(for_each_head(attention.v_proj.weight).T * handed_on)
            block.mlp.down_proj.weight.mul_(into_residual)
    return model


# -------------------------------------------------------------------------------------------------------- the programs


def shape(layers, width, heads, kv_heads):
    """A miniature Llama; its proportions follow Llama's own (8/3 of the width inside the MLP, heads of 32)."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=width, intermediate_size=math.ceil(width / 6) * 16, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width // heads, max_position_embeddings=512,
    )  # fmt: skip


# Shape, millions of training tokens, peak learning rate, and whether it starts copying and learns answers only. The draft
# is the first four layers of mini-7b.
TARGETS = {
    "mini-7b": (shape(10, 160, 5, 5), 6.0, 2.5e-3, False),
    "mini-13b": (shape(13, 192, 6, 6), 7.0, 2e-3, False),
    "mini-70b": (shape(20, 256, 8, 2), 4.0, 1.5e-3, True),
}
DRAFT_LAYERS, DRAFT_EXITS, DRAFT_TOKENS = 4, (2, 3, 4), 1.5
# From s2d.bench's sweep: a chain that is fast for every target, and the tree of which most is accepted.
DRAFTING = {"thresholds": (0.8, 0.8, 0.0), "draft_length": 12, "draft_stop": 0.5, "draft_tree": (3, 12, 32)}
MINI = Recipe(batch=4, micro_batch=4, length=256, lr=1e-3)
# The paper's for ShareGPT (arXiv 2407.01955, section 4); without weight decay, as is usual for a model already trained.
PAPER = Recipe(batch=128, micro_batch=4, length=2048, lr=2e-5, epochs=3, weight_decay=0.0, recompute=True)


TOKENIZER_CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "legacy": True,
    "clean_up_tokenization_spaces": False,
}


def make_tokenizer(folder, seed, count=20000):
    """Train the family's tokenizer on ``count`` training conversations, built as Llama's is; transformers reads it too."""
    texts = (
        f"{VICUNA_SYSTEM} USER: {question} ASSISTANT: {answer}"
        for conversation in islice(conversations(seed, "train"), count)
        for question, answer in conversation.turns
    )
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=model, model_type="bpe", vocab_size=VOCAB_SIZE, byte_fallback=True,
        split_digits=True, character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")


def train_mini(out, only, device, seed, resume):
    """Train the family in the order in which it becomes useful: mini-7b, mini-draft, mini-13b, mini-70b."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in only or ["mini-7b", "mini-draft", "mini-13b", "mini-70b"]
              if not (resume and (out / name).is_dir())]  # fmt: skip
    for name in wanted:  # all of them first: what is in the way of the last would otherwise show after hours
        check_out(out / name, resume)
    for name in wanted:
        if name == "mini-draft":
            train_soft(out / "mini-7b", DRAFT_LAYERS, DRAFT_EXITS, "mini", out / name, device, MINI, DRAFT_TOKENS,
                       seed + 1, resume, DRAFTING)  # fmt: skip
        else:
            train_target(name, out, device, seed, resume)


def train_target(name, out, device, seed, resume):
    """One of TARGETS from nothing, and the tokenizer they all share."""
    config, millions, peak, copying = TARGETS[name]
    model, recipe = initialise(config, seed, copying).to(check_device(device)), replace(MINI, lr=peak)
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder), seed)
        tokenizer, rows = Tokenizer(Path(folder) / "tokenizer.model"), corpus_rows(millions, recipe)
        # To foresee the questions as well, a model that copies would first have to unlearn it.
        tokens, labels = pack(corpus_dialogues(seed), tokenizer, rows, recipe.length, answers_only=copying)
        train_and_save(model, (config.num_hidden_layers,), tokens, labels, recipe, out / name, folder, resume, seed)


def corpus_rows(millions, recipe):
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
    tokenizer, skipped = Tokenizer(Path(init) / "tokenizer.model"), Counter()
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
    show_progress(out.name, exits, steps, recipe.batch * recipe.length, training)
    if whole := parallel.gathered(model, mesh):
        save_model(whole, out, tokenizer_from)
        shutil.rmtree(checkpoint, ignore_errors=True)


def checkpoint_of(out):
    return out.with_name(out.name + ".checkpoint")


def check_out(out, resume):
    """Raise ValueError where a training to ``out`` could not be saved, or would cost what another has left there."""
    check_free(out)
    check_not_lost(checkpoint_of(out), resume)


def numbers(text):
    return tuple(int(part) for part in text.split(","))


def main(arguments=None):
    args = parse(arguments)
    together = torch.distributed.is_torchelastic_launched()
    return run_program("train", run_on_every_rank if together else run, args)


def parse(arguments):
    parser = Parser(prog="python -m s2d.train", description=__doc__.splitlines()[0])
    programs = parser.add_subparsers(dest="program", required=True)
    common = Parser(add_help=False)
    common.add_argument("--device", default="cpu")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    mini = programs.add_parser("mini", parents=[common], help="the miniature family, from nothing")
    mini.add_argument("--out", type=Path, default=Path("family"))
    mini.add_argument("--only", nargs="+", choices=[*TARGETS, "mini-draft"], help="train just these members")
    soft = programs.add_parser("soft", parents=[common], help="a nested draft from the first layers of a Llama",
                               description="Defaults are the paper's, or with --data mini those of mini-draft.")  # fmt: skip
    soft.add_argument("--init", type=Path, required=True, help="folder of the Llama to cut from")
    soft.add_argument("--layers", type=int, required=True, help="how many of its layers the draft keeps")
    soft.add_argument("--exits", type=numbers, required=True, help="layers after which it predicts, e.g. 6,9,12")
    soft.add_argument("--data", default="mini", help="ShareGPT JSON file, or mini for the built-in corpus")
    soft.add_argument("--out", type=Path, required=True)
    soft.add_argument("--batch", type=int, help="rows of a step, over all processes")
    soft.add_argument("--micro-batch", type=int, help="rows that go through the model at once; gradients add up")
    soft.add_argument("--length", type=int, help="tokens of a row")
    soft.add_argument("--lr", type=float, help="peak learning rate")
    soft.add_argument("--epochs", type=int)
    soft.add_argument("--recompute", action=argparse.BooleanOptionalAction, help="activation checkpointing")
    soft.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="mixed precision (default) or all float32")
    soft.add_argument("--millions", type=float, default=DRAFT_TOKENS, help="million training tokens taken from mini")
    soft.add_argument("--teacher", type=Path, help="folder of a model whose distributions are to be learnt as well")
    soft.add_argument("--kd", choices=("forward", "reverse", "tv"), default="forward", help="how far from the teacher's")
    soft.add_argument("--kd-weight", type=float, default=1.0, help="weight of that, where the cross entropy's is 1")
    return parser.parse_args(arguments)


def run_on_every_rank(args):
    """``run`` in each of the processes that torchrun started."""
    with parallel.joined(args.device) as (mesh, args.device):
        return run(args, mesh)


def run(args, mesh=None):
    if args.program == "mini" and mesh:
        raise ValueError("the miniature family trains in a single process; start it without torchrun")
    if args.program == "mini":
        train_mini(args.out, args.only, args.device, args.seed, args.resume)
        return
    check_out(args.out, args.resume)
    if args.exits[-1] != args.layers:
        raise ValueError(f"the last exit must be the last of the {args.layers} layers, got {list(args.exits)}")
    config = read_config(args.init)
    exits, _ = choose_exits(replace(config, num_hidden_layers=args.layers), "s2d", args.exits)
    recipe = MINI if args.data == "mini" else PAPER
    given = {field.name: getattr(args, field.name, None) for field in fields(Recipe)}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    if min(recipe.batch, recipe.micro_batch, recipe.length, recipe.epochs) < 1 or not recipe.lr > 0:
        raise ValueError(f"batch, micro-batch, length, epochs and lr must be positive, got {recipe}")
    if recipe.length > config.max_position_embeddings:
        raise ValueError(f"rows of {recipe.length} tokens are longer than the context of {args.init}, "
                         f"{config.max_position_embeddings}; give --length")  # fmt: skip
    distillation = None
    if args.teacher:
        teacher = load_model(args.teacher, args.device)
        if teacher.config.vocab_size != config.vocab_size:
            raise ValueError(f"{args.teacher} has {teacher.config.vocab_size} tokens, {args.init} {config.vocab_size}")
        if recipe.length > teacher.config.max_position_embeddings:
            raise ValueError(f"rows of {recipe.length} tokens are longer than the context of {args.teacher}, "
                             f"{teacher.config.max_position_embeddings}; give --length")  # fmt: skip
        distillation = Distillation(teacher, args.kd, args.kd_weight)
    train_soft(args.init, args.layers, exits, args.data, args.out, args.device, recipe, args.millions, args.seed,
               args.resume, None, distillation, mesh)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
