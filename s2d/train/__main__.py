"""Train drafts, the miniatures, decision models; make datastores."""

import sys
from collections.abc import Callable
from typing import Any

from ..cli.ending import run_program


def main(arguments: list[str] | None = None) -> int:
    return run_program("python -m s2d.train", run, arguments)


def run(arguments: list[str] | None) -> None:
    """Do what the command line says, in each of the processes that torchrun started, if it did."""
    import torch.distributed as dist

    from ..passes.processes import join_processes, own_device
    from .fit import Run
    from .nested import train_soft

    join_processes()
    options = vars(parse(arguments))
    train = options.pop("train")
    if dist.is_initialized() and train is not train_soft:
        raise ValueError("this trains in a single process; start it without torchrun")
    device = own_device(options.pop("device"))
    train(Run(options.pop("out"), str(device), options.pop("seed")), **options)


def parse(arguments: list[str] | None) -> Any:
    """What was given, or has a default here, as arguments of ``train``, which is one of them."""
    from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter

    from ..cli.program import Parser, comma_separated, count, file_name, positive, whole
    from .data import make_datastore
    from .decision import LEARNING_RATE, train_decision
    from .family import train_mini
    from .nested import MINI, PAPER, train_soft

    common = Parser(add_help=False)
    common.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps ...")
    common.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="of all random numbers")
    common.add_argument("--out", type=file_name, required=True, help="the folder or file to write")
    shared: dict[str, Any] = {"parents": [common], "argument_default": SUPPRESS}
    shared["formatter_class"] = ArgumentDefaultsHelpFormatter
    parser = Parser(prog="python -m s2d.train", description=__doc__)
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")

    def add_program(name: str, train: Callable, words: str, after: str = "") -> Callable:
        program = programs.add_parser(name, help=words, epilog=after, **shared)
        program.set_defaults(train=train)
        return program.add_argument

    defaults = f"What is not given: of mini, {MINI}; of a file, {PAPER}."
    add = add_program("soft", train_soft, "a sorted draft of a Llama's first layers", defaults)
    add("--init", required=True, help="the Llama to cut from: a folder or a name")
    add("--exits", type=comma_separated(int), required=True, help="layers it predicts after")
    add("--data", default="mini", help="a file of dialogues, or mini (the corpus)")
    add("--weights", type=comma_separated(positive), help="of the exits' losses (equal)")
    add("--batch", type=count, help="rows per step, over all processes")
    add("--micro-batch", type=count, help="rows that go through the model at once, at most")
    add("--length", type=count, help="tokens per row")
    add("--lr", type=positive, help="peak learning rate")
    add("--epochs", type=count, help="times that all rows are learnt from")
    add("--millions", type=positive, help="million tokens, at most")
    add("--all-text", action="store_true", help="learn what users say, too: pre-training")
    add("--teacher", help="a model, whose distributions are learnt as well")
    add("--align", type=positive, help="weight of the teacher's features, learnt instead")

    add = add_program("mini", train_mini, "the miniature family, from nothing")
    add("--millions", type=positive, help="million tokens for each (its own)")

    add = add_program("decision", train_decision, "a model that says when a draft should stop")
    add("--target", required=True, help="the model that accepts or not: a folder or a name")
    add("--draft", required=True, help="the draft that is to stop")
    add("--features", choices=LEARNING_RATE, default="stats", help="hidden states, or figures of q")
    add("--data", default="mini", help="a file of dialogues, or mini (the corpus)")
    add("--prompts", type=count, default=400, help="at most; it is answered twice")
    add("--epochs", type=count, default=6, help="times that all of them are learnt from")

    add = add_program("text", make_datastore, "a datastore for exit 0 to draft from")
    add("--target", required=True, help="the model whose tokens it has: a folder or a name")
    add("--from", type=file_name, nargs="+", dest="files", required=True, help="texts in UTF-8")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
