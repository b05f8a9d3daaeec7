"""Train drafts, the miniatures, decision models; make datastores."""

import sys
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint import check_device
from ..checkpoint.names import datastore_path
from ..cli.program import Parser, comma_separated, positive, run_program
from ..cli.torchrun import run_in_each
from ..files import claimed, refuse_existing
from ..speed.ranks import new_sums_group, own_device
from .decision import FEATURES, train_decision
from .family import DRAFT_TOKENS, TARGETS, train_mini
from .fit import Run
from .nested import RECIPES, train_soft
from .self_text import make_datastore


def main(arguments: list[str] | None = None) -> int:
    run = run_in_each if dist.is_torchelastic_launched() else run_program
    return run("train", start, arguments)


def start(arguments: list[str] | None) -> None:
    """Do what the command line says, in each of the processes that torchrun started, if it did."""
    run_training(**vars(parse(arguments)))


def run_training(
    train: Callable[..., None],
    device: str,
    seed: int,
    out: Path | None = None,
    resume: bool = False,
    **options: Any,
) -> None:
    """Call the function ``train`` of one of the programs. Nobody else writes ``out`` meanwhile."""
    mesh = None
    rank = 0
    if dist.is_initialized():
        if train is not train_soft or options["data"] == "self":
            raise ValueError("this trains in a single process; start it without torchrun")
        own = own_device(device)
        mesh = DeviceMesh.from_group(new_sums_group(own), own.type)
        rank = dist.get_rank()
    else:
        own = check_device(device)
    if out is None:  # a datastore: next to its target, where nothing is replaced
        out = datastore_path(options["target"])
        refuse_existing(out)
    run = Run(out, str(own), seed, resume, mesh)
    with claimed(out) if rank == 0 else nullcontext():
        if run.unfinished.exists() and not resume:
            raise ValueError(
                f"{run.unfinished} is there already; go on with --resume, or remove it"
            )
        train(run, **options)


def parse(arguments: list[str] | None) -> Namespace:
    """The options that were given, or have a default here, and the function ``train``.

    They are called as the arguments of ``run_training`` and of that function are.
    """
    parser = Parser(prog="python -m s2d.train", description=__doc__)
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")
    for name, add_options, what in (
        ("soft", add_soft, "a sorted draft from the first layers of a Llama"),
        ("mini", add_mini, "the miniature family, from nothing"),
        ("decision", add_decision, "a model that says when a draft should stop"),
        ("text", add_text, "a datastore to draft from"),
    ):
        program = programs.add_parser(
            name,
            help=what,
            description=what,
            argument_default=SUPPRESS,
            formatter_class=ArgumentDefaultsHelpFormatter,
        )
        program.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps ...")
        program.add_argument("--seed", type=int, default=0, help="of all random numbers")
        add_options(program)
    return parser.parse_args(arguments)


def add_soft(parser: ArgumentParser) -> None:
    parser.set_defaults(train=train_soft)
    add = parser.add_argument
    add("--init", type=Path, required=True, help="folder of the Llama to cut from")
    layers = "how many of its layers the draft keeps: the last of its exits"
    add("--layers", type=int, required=True, help=layers)
    add("--exits", type=comma_separated(int), required=True, help="layers it predicts after")
    source = "a file of dialogues, mini (the corpus) or self (the Llama's own)"
    add("--data", default="mini", help=source)
    add("--out", type=Path, required=True, help="folder to write the draft to")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    for field, kind, what in (
        ("batch", int, "rows per step, over all processes"),
        ("micro_batch", int, "rows that go through the model at once; gradients add up"),
        ("length", int, "tokens per row"),
        ("lr", float, "peak learning rate"),
        ("epochs", int, "times that all rows are learnt from"),
    ):
        own = [f"{getattr(recipe, field):g} with {data}" for data, recipe in RECIPES.items()]
        option = "--" + field.replace("_", "-")
        add(option, type=kind, help=f"{what} (default: {', '.join(own)})")
    millions = "million tokens of mini or of answers"
    add("--millions", type=positive, default=DRAFT_TOKENS, help=millions)
    add("--teacher", type=Path, help="a model's folder: its distributions are learnt as well")


def add_mini(parser: ArgumentParser) -> None:
    parser.set_defaults(train=train_mini)
    add = parser.add_argument
    add("--out", type=Path, default=Path("family"), help="folder for all of them")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    own = [f"{name} {target.millions:g}" for name, target in TARGETS.items()]
    own = ", ".join([*own, f"mini-draft {DRAFT_TOKENS:g}"])
    add("--millions", type=positive, help=f"million training tokens of each (default: {own})")


def add_decision(parser: ArgumentParser) -> None:
    parser.set_defaults(train=train_decision)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the model that accepts or not")
    add("--draft", type=Path, required=True, help="folder of the draft that is to stop")
    add("--out", type=Path, required=True, help="the safetensors file to write")
    add("--features", choices=FEATURES, default="stats", help="hidden states, or figures of q")
    source = "a file of dialogues, mini or self, as of soft (default: what the draft learnt from)"
    add("--data", help=source)
    prompts = "at most, answered twice each; a fifth is kept out"
    add("--prompts", type=int, default=400, help=prompts)
    add("--epochs", type=int, default=6, help="times that all of them are learnt from")


def add_text(parser: ArgumentParser) -> None:
    parser.set_defaults(train=make_datastore)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the model whose datastore it is")
    add("--out", type=Path, help="the safetensors file (default: next to the target's folder)")
    add("--resume", action="store_true", help="go on with the answers where it was cut short")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--millions", type=positive, help="million tokens of answers that the target writes")
    add("--from", type=Path, nargs="+", dest="files", metavar="FILE", help="or text in UTF-8")


if __name__ == "__main__":
    sys.exit(main())
