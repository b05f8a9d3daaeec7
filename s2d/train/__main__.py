"""Train drafts, the miniatures, decision models; make datastores."""

import sys
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..cli.program import Parser, comma_separated, count, positive, run_program
from ..speed.tensor_parallel import join_processes, own_device
from .decision import FEATURES, train_decision
from .family import DRAFT_MILLIONS, train_mini
from .fit import Run
from .nested import MINI, PAPER, train_soft
from .text import make_datastore


def main(arguments: list[str] | None = None) -> int:
    return run_program("python -m s2d.train", run, arguments)


def run(arguments: list[str] | None) -> None:
    """Do what the command line says, in each of the processes that torchrun started, if it did."""
    join_processes()
    options = vars(parse(arguments))
    train = options.pop("train")
    if dist.is_initialized() and train is not train_soft:
        raise ValueError("this trains in a single process; start it without torchrun")
    device = own_device(options.pop("device"))
    out, seed, resume = options.pop("out"), options.pop("seed"), options.pop("resume", False)
    train(Run(out, str(device), seed, resume), **options)


def seed_number(text: str) -> int:
    """A seed: PyTorch's generator on a CPU would take no more than its 32 bits."""
    if not 0 <= int(text) < 2**32:
        raise ArgumentTypeError(f"must be from 0 to 4294967295, got {text}")
    return int(text)


def parse(arguments: list[str] | None) -> Any:
    """The options that were given, or have a default here, and the function ``train``.

    The others than those of all programs are called as the arguments of that function are.
    """
    parser = Parser(prog="python -m s2d.train", description=__doc__)
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")
    for name, train, add_options, what in (
        ("soft", train_soft, add_soft, "a sorted draft from the first layers of a Llama"),
        ("mini", train_mini, add_mini, "the miniature family, from nothing"),
        ("decision", train_decision, add_decision, "a model that says when a draft should stop"),
        ("text", make_datastore, add_text, "a datastore for exit 0 to draft from"),
    ):
        program = programs.add_parser(
            name,
            help=what,
            description=what,
            argument_default=SUPPRESS,
            formatter_class=ArgumentDefaultsHelpFormatter,
        )
        program.set_defaults(train=train)
        add = program.add_argument
        add("--device", default="auto", help="cpu, cuda, cuda:1, mps ...")
        add("--seed", type=seed_number, default=0, help="of all random numbers")
        add("--out", type=Path, required=True, help="the folder or file to write")
        add_options(add)
    return parser.parse_args(arguments)


def add_soft(add: Callable[..., Any]) -> None:
    add("--init", required=True, help="the Llama to cut from: a folder or a name")
    exits = "layers it predicts after; it keeps those up to the last"
    add("--exits", type=comma_separated(int), required=True, help=exits)
    source = "a file of dialogues, a text in FILE.txt, or mini (the corpus)"
    add("--data", default="mini", help=source)
    add("--resume", action="store_true", help="go on from the last checkpoint")
    for field, kind, what in (
        ("batch", count, "rows per step, over all processes"),
        ("micro_batch", count, "rows that go through the model at once; gradients add up"),
        ("length", count, "tokens per row"),
        ("lr", positive, "peak learning rate"),
        ("epochs", count, "times that all rows are learnt from"),
    ):
        own = f"{getattr(MINI, field):g} with mini, {getattr(PAPER, field):g} with a file"
        add("--" + field.replace("_", "-"), type=kind, help=f"{what} (default: {own})")
    add("--millions", type=positive, default=DRAFT_MILLIONS, help="million tokens of mini")
    add("--all-text", action="store_true", help="learn what users say, too: pre-training")
    add("--teacher", help="a model, whose distributions are learnt as well")
    align = "weight: the teacher's features are learnt in the place of its distributions"
    add("--align", type=positive, help=align)


def add_mini(add: Callable[..., Any]) -> None:
    add("--millions", type=positive, help="million training tokens of each (default: its own)")


def add_decision(add: Callable[..., Any]) -> None:
    add("--target", required=True, help="the model that accepts or not: a folder or a name")
    add("--draft", required=True, help="the draft that is to stop")
    add("--features", choices=FEATURES, default="stats", help="hidden states, or figures of q")
    add("--data", default="mini", help="a file of dialogues, or mini (the corpus)")
    add("--prompts", type=count, default=400, help="at most; it is answered twice")
    add("--epochs", type=count, default=6, help="times that all of them are learnt from")


def add_text(add: Callable[..., Any]) -> None:
    add("--target", required=True, help="the model whose tokens it has: a folder or a name")
    files = "texts in UTF-8"
    add("--from", type=Path, nargs="+", dest="files", required=True, metavar="FILE", help=files)


if __name__ == "__main__":
    sys.exit(main())
