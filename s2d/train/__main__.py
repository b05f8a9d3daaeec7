"""Train drafts, the miniatures, decision models; make datastores."""

import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..checkpoint import check_device
from ..checkpoint.names import datastore_path
from ..cli.program import Parser, comma_separated, positive, run_program
from ..cli.torchrun import run_in_each
from ..files import claimed
from ..speed.ranks import from_rank_0, own_device
from .decision import FEATURES, train_decision
from .family import DRAFT_TOKENS, TARGETS, train_mini
from .fit import Run
from .nested import RECIPES, train_soft
from .self_text import make_datastore


def main(arguments: list[str] | None = None) -> int:
    run = run_in_each if dist.is_torchelastic_launched() else run_program
    return run("train", lambda: start(**vars(from_rank_0(lambda: parse(arguments)))))


def start(
    train: Callable[..., None],
    out: Path | None,
    device: str,
    seed: int,
    resume: bool = False,
    **options: Any,
) -> None:
    """Call the function ``train``, in each of the processes that torchrun started, if it did.

    Nobody else trains to the same ``out`` meanwhile.
    """
    if not dist.is_initialized():
        run = Run(out, str(check_device(device)), seed, resume)
    elif train is not train_soft or options["data"] == "self":
        raise ValueError("this trains in a single process; start it without torchrun")
    else:
        own = own_device(device)
        mesh = init_device_mesh(own.type, (dist.get_world_size(),))
        run = Run(out, str(own), seed, resume, mesh)
    place = out or datastore_path(options["target"])
    with ExitStack() as claim:
        from_rank_0(lambda: claim.enter_context(claimed(place)))
        train(run, **options)


def parse(arguments: list[str] | None) -> Namespace:
    parser = Parser(prog="python -m s2d.train", description=__doc__)
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")

    def program(name: str, train: Callable[..., None], what: str) -> Callable[..., None]:
        each = programs.add_parser(name, help=what, description=what)
        each.set_defaults(train=train)

        def add(name: str, help: str, **options: Any) -> None:
            if options.get("default") is not None:
                help += " (default: %(default)s)"
            each.add_argument(name, help=help, **options)

        add("--device", default="auto", help="cpu, cuda, cuda:1, mps ...")
        add("--seed", type=int, default=0, help="of all random numbers")
        return add

    def by_data(field: str) -> str:
        """The defaults of a field of the recipe, which depend on --data."""
        found = {name: getattr(recipe, field) for name, recipe in RECIPES.items()}
        shown = ", ".join(f"{value:g} with {name}" for name, value in found.items())
        return f"(default: {shown})"

    add = program("soft", train_soft, "a sorted draft from the first layers of a Llama")
    add("--init", type=Path, required=True, help="folder of the Llama to cut from")
    add("--layers", type=int, required=True, help="how many of its layers the draft keeps")
    add("--exits", type=comma_separated(int), required=True, help="layers it predicts after")
    add(
        "--data",
        default="mini",
        help="a file of dialogues, mini (the corpus) or self (the Llama's own)",
    )
    add("--out", type=Path, required=True, help="folder to write the draft to")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    rows = "rows per step, over all processes"
    add("--batch", type=int, help=f"{rows} {by_data('batch')}")
    at_once = "rows that go through the model at once; gradients add up"
    add("--micro-batch", type=int, help=f"{at_once} {by_data('micro_batch')}")
    add("--length", type=int, help=f"tokens per row {by_data('length')}")
    add("--lr", type=float, help=f"peak learning rate {by_data('lr')}")
    add("--epochs", type=int, help=f"times that all rows are learnt from {by_data('epochs')}")
    add(
        "--millions",
        type=positive,
        default=DRAFT_TOKENS,
        help="million tokens of mini or of answers",
    )
    add("--teacher", type=Path, help="a model's folder: its distributions are learnt as well")

    add = program("mini", train_mini, "the miniature family, from nothing")
    add("--out", type=Path, default=Path("family"), help="folder for all of them")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    own = ", ".join(f"{name} {millions:g}" for name, (_, millions, *_) in TARGETS.items())
    own = f"default: {own}, mini-draft {DRAFT_TOKENS:g}"
    add("--millions", type=positive, help=f"million training tokens of each ({own})")

    add = program("decision", train_decision, "a model that says when a draft should stop")
    add("--target", type=Path, required=True, help="folder of the model that accepts or not")
    add("--draft", type=Path, required=True, help="folder of the draft that is to stop")
    add("--out", type=Path, required=True, help="the safetensors file to write")
    add("--features", choices=FEATURES, default="stats", help="hidden states, or figures of q")
    add(
        "--data",
        help="a file of dialogues, mini or self, as of soft (default: what the draft learnt from)",
    )
    add(
        "--prompts", type=int, default=400, help="at most, answered twice each; a fifth is kept out"
    )
    add("--epochs", type=int, default=6, help="times that all of them are learnt from")

    add = program("text", make_datastore, "a datastore to draft from")
    add("--target", type=Path, required=True, help="folder of the model whose datastore it is")
    add("--out", type=Path, help="the safetensors file (default: next to the target's folder)")
    add("--resume", action="store_true", help="go on with the answers where it was cut short")
    add("--millions", type=positive, help="million tokens of answers for the target to write, or")
    add("--from", type=Path, nargs="+", dest="files", metavar="FILE", help="text in UTF-8 instead")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
