"""Train drafts, the miniatures, decision models; make datastores."""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..cli.program import Parser, comma_separated, positive, run_program
from ..extras.tensor_parallel import from_rank_0, own_device, run_in_each
from ..weights import check_device
from .decision import FEATURES, train_decision
from .family import DRAFT_TOKENS, train_mini
from .fit import Run
from .nested import train_soft
from .self_text import make_datastore


def main(arguments=None):
    run = run_in_each if dist.is_torchelastic_launched() else run_program
    return run("train", lambda: start(**vars(from_rank_0(lambda: parse(arguments)))))


def start(train, out, device, seed, resume=False, **options):
    """Call the function ``train``, in each of the processes that torchrun started, if it did."""
    if not dist.is_initialized():
        return train(Run(out, str(check_device(device)), seed, resume), **options)
    if train is not train_soft or options["data"] == "self":
        raise ValueError("this trains in a single process; start it without torchrun")
    device = own_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    train(Run(out, str(device), seed, resume, mesh), **options)


def parse(arguments):
    parser = Parser(prog="python -m s2d.train", description=__doc__)
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")

    def program(name, train, what):
        each = programs.add_parser(name, help=what)
        each.set_defaults(train=train)
        each.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps ...")
        each.add_argument("--seed", type=int, default=0, help="of all random numbers")
        return each.add_argument

    add = program("soft", train_soft, "a sorted draft from the first layers of a Llama")
    add("--init", type=Path, required=True, help="folder of the Llama to cut from")
    add("--layers", type=int, required=True, help="how many of its layers the draft keeps")
    add("--exits", type=comma_separated(int), required=True, help="layers it predicts after")
    add("--data", default="mini", help="ShareGPT JSON, mini (the corpus) or self (the Llama's own)")
    add("--out", type=Path, required=True, help="folder to write the draft to")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--batch", type=int, help="rows per step, over all processes")
    add("--micro-batch", type=int, help="rows that go through the model at once; gradients add up")
    add("--length", type=int, help="tokens per row")
    add("--lr", type=float, help="peak learning rate")
    add("--epochs", type=int, help="times that all rows are learnt from")
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
    add("--millions", type=positive, help="million training tokens of each; default: its own")

    add = program("decision", train_decision, "when a draft should stop")
    add("--target", type=Path, required=True, help="folder of the model that accepts or not")
    add("--draft", type=Path, required=True, help="folder of the draft that is to stop")
    add("--out", type=Path, required=True, help="the safetensors file to write")
    add("--features", choices=FEATURES, default="stats", help="hidden states, or figures of q")
    add("--data", default="mini", help="ShareGPT JSON file, or mini for the built-in corpus")
    add("--prompts", type=int, default=400, help="answered twice each; a fifth is kept out")
    add("--epochs", type=int, default=6, help="times that all of them are learnt from")

    add = program("text", make_datastore, "a datastore to draft from")
    add("--target", type=Path, required=True, help="folder of the model whose datastore it is")
    add("--out", type=Path, help="the safetensors file; default: next to the target's folder")
    add("--resume", action="store_true", help="go on with the answers where it was cut short")
    add("--millions", type=positive, help="million tokens of answers for the target to write, or")
    add("--from", type=Path, nargs="+", dest="files", metavar="FILE", help="text in UTF-8 instead")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
