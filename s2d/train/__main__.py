"""Training: a sorted draft of any Llama (soft), the miniatures (mini), when to stop (decision).

python -m s2d.train soft --init weights/mini-7b --layers 4 --exits 2,3,4 --data mini --out draft
python -m s2d.train mini --out family
python -m s2d.train decision --target weights/mini-7b --draft weights/mini-draft --out FILE
python -m s2d.train text --target weights/smollm2-135m --millions 0.1
"""

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch

from ..extras.decision import FEATURES
from ..extras.parallel import joined
from ..generate import choose_exits
from ..program import Parser, run_program
from ..weights import check_device, load_model
from ..weights.config import read_config
from ..weights.datastore import DATASTORE
from .decision import train_decision
from .distil import DIVERGENCES, Distillation
from .family import DRAFT_TOKENS, TARGETS, train_mini
from .fit import Recipe, Run
from .nested import ADAPTER_LR, MINI, PAPER, SELF, check_out, corpus_rows, rows_of, train_soft
from .text import make_datastore


def main(arguments=None):
    args = parse(arguments)
    together = torch.distributed.is_torchelastic_launched()
    return run_program("train", run_on_every_rank if together else run, args)


def run_on_every_rank(args):
    """``run`` in each of the processes that torchrun started."""
    with joined(args.device) as (mesh, args.device):
        return run(args, mesh)


def run(args, mesh=None):
    args.device = str(check_device(args.device))
    if args.program == "soft":
        soft(args, mesh)
    elif mesh:
        raise ValueError(f"{args.program!r} trains in a single process; start it without torchrun")
    elif args.program == "mini":
        train_mini(args.out, args.only, args.device, args.seed, args.resume, args.millions)
    elif args.program == "text":
        out = args.out or args.target / DATASTORE
        make_datastore(args.target, out, args.millions, args.files, args.device, args.seed)
    else:
        train_decision(args)


def soft(args, mesh):
    """Refuse what cannot be trained, before anything is loaded that takes long; then train."""
    check_out(args.out, args.resume)
    if args.exits[-1] != args.layers:
        wrong = f"the {args.layers} layers, got {list(args.exits)}"
        raise ValueError(f"the last exit must be the last of {wrong}")
    config = read_config(args.init)
    exits, _ = choose_exits(replace(config, num_hidden_layers=args.layers), "s2d", args.exits)
    recipe = recipe_of(args)
    check_length(recipe, args.init, config)
    if args.data in ("mini", "self"):
        corpus_rows(args.millions, recipe)  # at least a batch, and no more than there will ever be
    if mesh and (args.lora or args.data == "self"):
        alone = "--lora and --data self run in a single process"
        raise ValueError(f"{alone}; start it without torchrun")
    distillation = None
    if args.teacher:
        teacher = load_model(args.teacher, args.device)
        theirs, own = teacher.config.vocab_size, config.vocab_size
        if theirs != own:
            raise ValueError(f"{args.teacher} has {theirs} tokens, {args.init} {own}")
        check_length(recipe, args.teacher, teacher.config)
        distillation = Distillation(teacher, args.kd, args.kd_weight)
    text = args.text or args.out.with_name(args.out.name + ".self.jsonl")
    rows = rows_of(args.init, args.data, args.device, recipe, args.millions, args.seed, text)
    run = Run(args.out, args.device, args.seed, args.resume, mesh)
    train_soft(
        args.init, exits, rows, recipe, run, None, distillation, args.lora, args.draft_vocabulary
    )


def recipe_of(args):
    """The recipe that fits the data, with the options that were given in their stead."""
    recipe = {"mini": MINI, "self": SELF}.get(args.data, PAPER)
    if args.lora:
        recipe = replace(recipe, lr=ADAPTER_LR)
    given = {field.name: getattr(args, field.name, None) for field in fields(Recipe)}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    if min(recipe.batch, recipe.micro_batch, recipe.length, recipe.epochs) < 1 or not recipe.lr > 0:
        raise ValueError(f"batch, micro-batch, length, epochs, lr must be positive, got {recipe}")
    return recipe


def check_length(recipe, path, config):
    if recipe.length > config.max_position_embeddings:
        longest = f"the context of {path}, {config.max_position_embeddings}"
        raise ValueError(f"rows of {recipe.length} tokens are longer than {longest}; give --length")


def numbers(text):
    return tuple(int(part) for part in text.split(","))


def rank(text):
    if not 1 <= int(text) <= 4096:
        raise ValueError
    return int(text)


def parse(arguments):
    parser = Parser(prog="python -m s2d.train", description=__doc__.splitlines()[0])
    programs = parser.add_subparsers(dest="program", required=True)
    common, resumed = Parser(add_help=False), Parser(add_help=False)
    common.add_argument("--device", default="auto")
    common.add_argument("--seed", type=int, default=0)
    resumed.add_argument("--resume", action="store_true", help="go on from the last checkpoint")

    def program(name, what, *parents, **more):
        return programs.add_parser(name, parents=[common, *parents], help=what, **more).add_argument

    defaults = "Defaults are the paper's, or with --data mini those of mini-draft."
    what = "a sorted draft from the first layers of a Llama"
    soft_options(program("soft", what, resumed, description=defaults))
    mini_options(program("mini", "the miniature family, from nothing", resumed))
    decision_options(program("decision", "when a draft should stop"))
    text_options(programs.add_parser("text", parents=[common], help="a datastore to draft from"))
    return parser.parse_args(arguments)


def soft_options(add):
    data = "ShareGPT JSON file, mini (the built-in corpus) or self (the Llama writes the text)"
    flag = argparse.BooleanOptionalAction
    add("--init", type=Path, required=True, help="folder of the Llama to cut from")
    add("--layers", type=int, required=True, help="how many of its layers the draft keeps")
    add("--exits", type=numbers, required=True, help="layers it predicts after, e.g. 6,9,12")
    add("--data", default="mini", help=data)
    add("--text", type=Path, help="where that text is kept, and found again; default: beside --out")
    add("--lora", type=rank, metavar="RANK", help="learn and save only low-rank adapters")
    add(
        "--draft-vocabulary", type=int, metavar="K", help="draft only the text's K likeliest tokens"
    )
    add("--out", type=Path, required=True)
    add("--batch", type=int, help="rows of a step, over all processes")
    add("--micro-batch", type=int, help="rows that go through the model at once; gradients add up")
    add("--length", type=int, help="tokens of a row")
    add("--lr", type=float, help="peak learning rate")
    add("--epochs", type=int)
    add("--recompute", action=flag, help="activation checkpointing")
    add("--bf16", action=flag, help="mixed precision (default) or all float32")
    add(
        "--millions", type=float, default=DRAFT_TOKENS, help="million tokens of mini, or of answers"
    )
    add("--teacher", type=Path, help="a model's folder: its distributions are learnt as well")
    add("--kd", choices=DIVERGENCES, default="forward", help="how far from the teacher's")
    add("--kd-weight", type=float, default=1.0, help="weight of that; the cross entropy's is 1")


def mini_options(add):
    add("--out", type=Path, default=Path("family"))
    add("--only", nargs="+", choices=[*TARGETS, "mini-draft"], help="train just these members")
    add("--millions", type=float, help="million training tokens of each; default: its own")


def decision_options(add):
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--out", type=Path, required=True, help="the safetensors file to write")
    add("--features", choices=FEATURES, default="stats")
    add("--data", default="mini", help="ShareGPT JSON file, or mini for the built-in corpus")
    add("--prompts", type=int, default=400, help="answered twice each; a fifth is kept out")
    add("--draft-length", type=int, default=10)
    add("--epochs", type=int, default=6)
    add("--threshold", type=float, default=0.4, help="stop where no path is as likely as this")


def text_options(parser):
    parser.add_argument("--target", type=Path, required=True, help="whose tokens, and who writes")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--millions", type=float, help="million tokens of answers to sample")
    files = "or texts to take"
    source.add_argument("--from", type=Path, nargs="+", dest="files", metavar="FILE", help=files)
    out = "the safetensors file to write; default: in the target's folder"
    parser.add_argument("--out", type=Path, help=out)


if __name__ == "__main__":
    sys.exit(main())
