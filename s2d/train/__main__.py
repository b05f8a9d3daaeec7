"""Training: drafts, the miniatures, what tunes drafting, and text to draft from.

python -m s2d.train soft --init weights/mini-7b --layers 4 --exits 2,3,4 --data mini --out draft
python -m s2d.train mini --out family
python -m s2d.train decision --target weights/mini-7b --draft weights/mini-draft --out d.safetensors
python -m s2d.train chances --target weights/mini-7b --draft weights/mini-draft
python -m s2d.train text --target weights/smollm2-135m --millions 0.1
"""

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch

from ..options import choose_exits
from ..parallel import joined
from ..program import Parser, run_program
from ..weights import check_device, load_model
from ..weights.config import read_config
from ..weights.datastore import DATASTORE
from .chances import train_chances
from .decision import train_decision
from .family import DRAFT_TOKENS, TARGETS, train_mini
from .fit import Recipe
from .nested import ADAPTER_LR, MINI, PAPER, SELF, check_out, corpus_rows, train_soft
from .soft import Distillation
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
    elif args.program == "chances":
        train_chances(args)
    elif args.program == "text":
        out = args.out or args.target / DATASTORE
        make_datastore(args.target, out, args.millions, args.files, args.device, args.seed)
    else:
        train_decision(args)


def soft(args, mesh):
    """Refuse what cannot be trained, before anything is loaded that takes long; then train."""
    check_out(args.out, args.resume)
    if args.exits[-1] != args.layers:
        raise ValueError(
            f"the last exit must be the last of the {args.layers} layers, got {list(args.exits)}"
        )
    config = read_config(args.init)
    exits, _ = choose_exits(replace(config, num_hidden_layers=args.layers), "s2d", args.exits)
    recipe = {"mini": MINI, "self": SELF}.get(args.data, PAPER)
    if args.lora:
        recipe = replace(recipe, lr=ADAPTER_LR)
    given = {field.name: getattr(args, field.name, None) for field in fields(Recipe)}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    if min(recipe.batch, recipe.micro_batch, recipe.length, recipe.epochs) < 1 or not recipe.lr > 0:
        raise ValueError(
            f"batch, micro-batch, length, epochs and lr must be positive, got {recipe}"
        )
    check_length(recipe, args.init, config)
    if args.data in ("mini", "self"):
        corpus_rows(args.millions, recipe)  # at least a batch, and no more than there will ever be
    if mesh and (args.lora or args.data == "self"):
        raise ValueError(
            "--lora and --data self run in a single process; start it without torchrun"
        )
    distillation = None
    if args.teacher:
        teacher = load_model(args.teacher, args.device)
        if teacher.config.vocab_size != config.vocab_size:
            raise ValueError(
                f"{args.teacher} has {teacher.config.vocab_size} tokens, "
                f"{args.init} {config.vocab_size}"
            )
        check_length(recipe, args.teacher, teacher.config)
        distillation = Distillation(teacher, args.kd, args.kd_weight)
    train_soft(
        args.init,
        args.layers,
        exits,
        args.data,
        args.out,
        args.device,
        recipe,
        args.millions,
        args.seed,
        args.resume,
        distillation=distillation,
        mesh=mesh,
        rank=args.lora,
        keep=args.draft_vocabulary,
        text=args.text or args.out.with_name(args.out.name + ".self.jsonl"),
    )


def check_length(recipe, path, config):
    if recipe.length > config.max_position_embeddings:
        raise ValueError(
            f"rows of {recipe.length} tokens are longer than the context of {path}, "
            f"{config.max_position_embeddings}; give --length"
        )


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
    soft = programs.add_parser(
        "soft",
        parents=[common, resumed],
        help="a sorted draft from the first layers of a Llama",
        description="Defaults are the paper's, or with --data mini those of mini-draft.",
    )
    soft.add_argument("--init", type=Path, required=True, help="folder of the Llama to cut from")
    soft.add_argument(
        "--layers", type=int, required=True, help="how many of its layers the draft keeps"
    )
    soft.add_argument(
        "--exits", type=numbers, required=True, help="layers after which it predicts, e.g. 6,9,12"
    )
    soft.add_argument(
        "--data",
        default="mini",
        help="ShareGPT JSON file, mini for the built-in corpus, or self for text that the Llama "
        "itself is to write first",
    )
    soft.add_argument(
        "--text", type=Path, help="where that text is kept, and found again; default: beside --out"
    )
    soft.add_argument(
        "--lora", type=rank, metavar="RANK", help="learn and save only low-rank adapters"
    )
    soft.add_argument(
        "--draft-vocabulary",
        type=int,
        metavar="K",
        help="draft only the K most frequent tokens of the text",
    )
    soft.add_argument("--out", type=Path, required=True)
    soft.add_argument("--batch", type=int, help="rows of a step, over all processes")
    soft.add_argument(
        "--micro-batch", type=int, help="rows that go through the model at once; gradients add up"
    )
    soft.add_argument("--length", type=int, help="tokens of a row")
    soft.add_argument("--lr", type=float, help="peak learning rate")
    soft.add_argument("--epochs", type=int)
    soft.add_argument(
        "--recompute", action=argparse.BooleanOptionalAction, help="activation checkpointing"
    )
    soft.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="mixed precision (default) or all float32",
    )
    soft.add_argument(
        "--millions",
        type=float,
        default=DRAFT_TOKENS,
        help="million tokens taken from mini, or of own answers",
    )
    soft.add_argument(
        "--teacher",
        type=Path,
        help="folder of a model whose distributions are to be learnt as well",
    )
    soft.add_argument(
        "--kd",
        choices=("forward", "reverse", "tv"),
        default="forward",
        help="how far from the teacher's",
    )
    soft.add_argument(
        "--kd-weight",
        type=float,
        default=1.0,
        help="weight of that, where the cross entropy's is 1",
    )
    mini = programs.add_parser(
        "mini", parents=[common, resumed], help="the miniature family, from nothing"
    )
    mini.add_argument("--out", type=Path, default=Path("family"))
    mini.add_argument(
        "--only", nargs="+", choices=[*TARGETS, "mini-draft"], help="train just these members"
    )
    mini.add_argument(
        "--millions", type=float, help="million training tokens of each; default: its own"
    )
    decision = programs.add_parser("decision", parents=[common], help="when a draft should stop")
    decision.add_argument("--target", type=Path, required=True)
    decision.add_argument("--draft", type=Path, required=True)
    decision.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    decision.add_argument("--features", choices=("hidden", "stats"), default="stats")
    decision.add_argument(
        "--data", default="mini", help="ShareGPT JSON file, or mini for the built-in corpus"
    )
    decision.add_argument(
        "--prompts",
        type=int,
        default=400,
        help="how many to answer, twice each; a fifth is kept out",
    )
    decision.add_argument("--draft-length", type=int, default=10)
    decision.add_argument("--epochs", type=int, default=6)
    decision.add_argument(
        "--threshold", type=float, default=0.4, help="stop where no path is as likely as this"
    )
    chances = programs.add_parser(
        "chances", parents=[common], help="what a target accepts of a draft, for --method auto"
    )
    chances.add_argument("--target", type=Path, required=True)
    chances.add_argument(
        "--draft", type=Path, required=True, help="the folder that the counts are put into"
    )
    chances.add_argument("--out", type=Path, help="another file for them")
    chances.add_argument(
        "--data",
        default="mini",
        help="ShareGPT JSON file, the .jsonl of --data self, or mini for the built-in corpus",
    )
    chances.add_argument(
        "--prompts", type=int, default=120, help="how many to answer, at T = 0 and at T = 1"
    )
    chances.add_argument("--max-new-tokens", type=int, default=96)
    text = programs.add_parser(
        "text", parents=[common], help="a datastore: what a model writes, to draft from it"
    )
    text.add_argument("--target", type=Path, required=True, help="whose tokens, and who writes")
    source = text.add_mutually_exclusive_group(required=True)
    source.add_argument("--millions", type=float, help="million tokens of answers to sample")
    source.add_argument(
        "--from", type=Path, nargs="+", dest="files", metavar="FILE", help="or texts to take"
    )
    text.add_argument(
        "--out", type=Path, help="the safetensors file to write; default: in the target's folder"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
