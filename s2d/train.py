"""Training: the miniature family from nothing (``mini``), or a nested draft from any Llama folder (``soft``).

    python -m s2d.train mini --out weights
    python -m s2d.train soft --init weights/mini-7b --layers 4 --exits 2,3,4 --data mini --out weights/mini-draft
"""

import argparse
import io
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import sentencepiece
import torch

from .corpus import conversations
from .decode import choose_exits
from .dialogues import corpus_dialogues, pack, read_sharegpt
from .model import Llama, LlamaConfig
from .program import run_program
from .soft import soft_losses
from .tokenizer import VICUNA_SYSTEM, Tokenizer
from .weights import check_device, load_model, save_model
from .weights.config import read_config

VOCAB_SIZE, LENGTH, BATCH = 1024, 256, 4
CHECKPOINT_SECONDS = 120


def initialise(config, seed):
    """A fresh Llama whose heads begin by attending to similar tokens and handing on what they see there.

    Every query weight starts near its key weight, every output weight as its value weight transposed, the LM head as
    the embedding: after the mimetic initialisation of Trockman and Kolter 2023 (arXiv 2305.09828, section 3). From
    independent weights models this small need several times as much text before they look things up in the prompt.
    """
    torch.manual_seed(seed)
    model = Llama(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    into_residual = (2 * config.num_hidden_layers) ** -0.5

    def for_each_head(weight):  # (G * D, hidden) -> (H * D, hidden)
        by_group = weight.view(config.num_key_value_heads, config.head_dim, -1)
        return by_group.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0).flatten(0, 1)

    with torch.no_grad():
        model.lm_head.weight.copy_(model.model["embed_tokens"].weight)
        for block in model.model["layers"]:
            attention = block.self_attn
            # Part of the query stays random, or heads that share a key would stay the same for ever.
            attention.q_proj.weight.mul_(0.5).add_(for_each_head(attention.k_proj.weight), alpha=1.4)
            attention.o_proj.weight.copy_(for_each_head(attention.v_proj.weight).T * into_residual)
            block.mlp.down_proj.weight.mul_(into_residual)
    return model


def learning_rate(step, steps, peak, warmup=0.04):
    """Linear warm-up over the first 4 % of the steps, then a cosine down to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / max(1, round(warmup * steps)))
    return peak * rising * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def fit(model, exits, tokens, labels, batch, peak, checkpoint, resume):
    """Train ``model`` in place on every row once, all ``exits`` together; yields (step, losses (E,)) after each step.

    AdamW under bf16 autocast. A checkpoint is kept while training lasts, from which ``resume`` goes on to the same
    losses as an uninterrupted run.
    """
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    steps, step, saved, device = len(tokens) // batch, 0, time.monotonic(), model.device
    if resume and checkpoint.is_file():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        rows = slice(step * batch, (step + 1) * batch)
        with torch.autocast(device.type, torch.bfloat16):
            losses = soft_losses(model, tokens[rows].to(device), labels[rows].to(device), exits)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            write_checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, checkpoint)
            saved = time.monotonic()
        yield step, losses.detach()
    checkpoint.unlink(missing_ok=True)


def show_progress(name, exits, steps, tokens_a_step, training):
    """Run ``training`` (what ``fit`` returns) to its end, with a line on stderr every ten seconds."""
    began = shown = time.monotonic()
    for count, (step, losses) in enumerate(training, 1):
        now = time.monotonic()
        if now - shown > 10 or step == steps:
            shown, speed = now, count / (now - began)
            per_exit = "  ".join(f"exit {e}: {loss:.3f}" for e, loss in zip(exits, losses.tolist()))
            print(f"{name} step {step}/{steps}  loss {per_exit}  {speed * tokens_a_step:.0f} tokens/s  "
                  f"{(steps - step) / speed / 60:.1f} min left", file=sys.stderr, flush=True)  # fmt: skip


def write_checkpoint(state, path):
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


# -------------------------------------------------------------------------------------------------------- the programs


def shape(layers, width, heads, kv_heads):
    """A miniature Llama; its proportions follow Llama's own (8/3 of the width inside the MLP, heads of 32)."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=width, intermediate_size=math.ceil(width / 6) * 16, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width // heads, max_position_embeddings=512,
    )  # fmt: skip


# Shape, millions of training tokens and peak learning rate of each target; the draft is the first four layers of mini-7b.
TARGETS = {
    "mini-7b": (shape(10, 160, 5, 5), 6.0, 2.5e-3),
    "mini-13b": (shape(13, 192, 6, 6), 7.0, 2e-3),
    "mini-70b": (shape(20, 256, 8, 2), 9.0, 1.5e-3),
}
DRAFT_LAYERS, DRAFT_EXITS, DRAFT_TOKENS = 4, (2, 3, 4), 1.5
DRAFTING = {"thresholds": (0.8, 0.8, 0.0), "draft_length": 6, "draft_tree": (4, 8, 24)}  # best in s2d.bench's sweep


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
    for name in only or ["mini-7b", "mini-draft", "mini-13b", "mini-70b"]:
        if resume and (out / name).is_dir():
            continue
        if name == "mini-draft":
            train_soft(out / "mini-7b", DRAFT_LAYERS, DRAFT_EXITS, "mini", out / name, device,
                       BATCH, LENGTH, 1e-3, DRAFT_TOKENS, seed + 1, resume, DRAFTING)  # fmt: skip
        else:
            train_target(name, out, device, seed, resume)


def train_target(name, out, device, seed, resume):
    """One of TARGETS from nothing, learning every token of the corpus, and the tokenizer they all share."""
    config, millions, peak = TARGETS[name]
    model = initialise(config, seed).to(check_device(device))
    rows = round(millions * 1e6 / (BATCH * LENGTH)) * BATCH
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder), seed)
        tokenizer = Tokenizer(Path(folder) / "tokenizer.model")
        tokens, labels = pack(corpus_dialogues(seed), tokenizer, rows, LENGTH, answers_only=False)
        exits = (config.num_hidden_layers,)
        training = fit(model, exits, tokens, labels, BATCH, peak, out / f"{name}.checkpoint", resume)
        show_progress(name, exits, len(tokens) // BATCH, BATCH * LENGTH, training)
        save_model(model, out / name, folder)


def train_soft(init, layers, exits, data, out, device, batch, length, peak, millions, seed, resume, drafting=None):
    """Cut the first ``layers`` from ``init`` and fine-tune all ``exits`` together on the assistant's words.

    ``drafting`` are the draft's defaults that its config is to carry; the paper's thresholds unless given.
    """
    model = load_model(init, device, "float32", num_layers=layers).requires_grad_(True)
    drafting = drafting or {"thresholds": (0.5,) * (len(exits) - 1) + (0.0,)}
    model.config = replace(model.config, exit_layers=exits, **drafting)
    tokenizer = Tokenizer(Path(init) / "tokenizer.model")
    if data == "mini":
        dialogues, rows = corpus_dialogues(seed), round(millions * 1e6 / (batch * length)) * batch
    else:
        dialogues, rows = read_sharegpt(data), sys.maxsize // length
    tokens, labels = pack(dialogues, tokenizer, rows, length, answers_only=True)
    if len(tokens) < batch:
        raise ValueError(f"{data} gives {len(tokens)} rows of {length} tokens; one batch needs {batch}")
    out.parent.mkdir(parents=True, exist_ok=True)
    training = fit(model, exits, tokens, labels, batch, peak, out.with_name(out.name + ".checkpoint"), resume)
    show_progress(out.name, exits, len(tokens) // batch, batch * length, training)
    save_model(model, out, init)


def numbers(text):
    return tuple(int(part) for part in text.split(","))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m s2d.train", description=__doc__.splitlines()[0])
    programs = parser.add_subparsers(dest="program", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", default="cpu")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    mini = programs.add_parser("mini", parents=[common], help="the miniature family, from nothing")
    mini.add_argument("--out", type=Path, default=Path("weights"))
    mini.add_argument("--only", nargs="+", choices=[*TARGETS, "mini-draft"], help="train just these members")
    soft = programs.add_parser("soft", parents=[common], help="a nested draft from the first layers of a Llama")
    soft.add_argument("--init", type=Path, required=True, help="folder of the Llama to cut from")
    soft.add_argument("--layers", type=int, required=True, help="how many of its layers the draft keeps")
    soft.add_argument("--exits", type=numbers, required=True, help="layers after which it predicts, e.g. 6,9,12")
    soft.add_argument("--data", default="mini", help="ShareGPT JSON file, or mini for the built-in corpus")
    soft.add_argument("--out", type=Path, required=True)
    soft.add_argument("--batch", type=int, default=BATCH, help="rows of a step")
    soft.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    soft.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    soft.add_argument("--millions", type=float, default=DRAFT_TOKENS, help="million training tokens taken from mini")
    return run_program("train", run, parser.parse_args(arguments))


def run(args):
    if args.program == "mini":
        train_mini(args.out, args.only, args.device, args.seed, args.resume)
    else:
        if args.exits[-1] != args.layers:
            raise ValueError(f"the last exit must be the last of the {args.layers} layers, got {list(args.exits)}")
        exits, _ = choose_exits(replace(read_config(args.init), num_hidden_layers=args.layers), "s2d", args.exits)
        train_soft(args.init, args.layers, exits, args.data, args.out, args.device,
                   args.batch, args.length, args.lr, args.millions, args.seed, args.resume)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
