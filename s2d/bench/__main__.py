"""The benchmark's command line: speed without a name before the options, or another program.

python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=decision
python -m s2d.bench sweep --methods s2d:stop={0.2,0.35,0.5}    # on training prompts
"""

import sys
from argparse import ArgumentTypeError

from ..program import Parser, comma_separated, path, run_program
from ..weights import DTYPES
from . import agreement, batches, papers, shapes, speed


def count(text):
    if int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


OPTIONS = {
    "targets": dict(
        type=comma_separated(str), default="7b,13b,70b", metavar="7b|PATH,...", help="models"
    ),
    "target": dict(required=True, metavar="7b|13b|70b|PATH", help="whose answers are predicted"),
    "draft": dict(type=path, help="default: the one beside the first target, else mini-draft"),
    "methods": dict(nargs="+", help="such as s2d:draft_length=8:stop=0.4; default: all"),
    "temperature": dict(
        type=comma_separated(float), default="0,1", metavar="T,...", help="0 is greedy"
    ),
    "questions": dict(type=path, help="in Spec-Bench's format; default: held-out ones"),
    "limit": dict(type=count, default=2, help="questions of each of the six groups"),
    "rounds": dict(type=count, default=3, help="in each all methods take turns"),
    "max-new-tokens": dict(type=count, default=128, help="a turn's answer ends there"),
    "device": dict(default="auto", help="cpu, cuda, cuda:1 ...; auto: a GPU if there is one"),
    "dtype": dict(default="auto", choices=("auto", *DTYPES), help="auto: the model's own"),
    "hf": dict(action="store_true", help="transformers beside ours"),
    "compile": dict(action="store_true", help="every method compiled as well"),
    "check": dict(action="store_true", help="answers against ar's; exit code 1 for a bug"),
    "markdown": dict(action="store_true", help="tables as markdown"),
    "out": dict(type=path, help="folder for answer files, as Spec-Bench's scripts read them"),
    "plot": dict(type=path, metavar="FILE.svg", help="the last table as a picture; of papers DIR"),
    "shapes": dict(nargs="+", choices=shapes.SHAPES, default=["7b", "13b"], help="sizes to make"),
    "context": dict(type=count, default=512, help="tokens of the prompt"),
    "batches": dict(
        type=comma_separated(count), default="1,2,4,8,16", metavar="N,N,...", help="prompts at once"
    ),
    "drafts": dict(type=path, metavar="DIR", help="what python -m s2d.train ablations made"),
    "only": dict(nargs="+", choices=papers.EXPERIMENTS, metavar="NAME", help="of these"),
}
SPEED = (
    "targets draft methods temperature questions limit rounds max-new-tokens device dtype "
    "hf compile check markdown out plot"
)
PROGRAMS = {  # name -> module, the options that it takes
    "": (speed, SPEED),
    "sweep": (speed, SPEED),
    "batches": (
        batches,
        "target draft methods batches questions limit rounds max-new-tokens device dtype hf "
        "markdown plot",
    ),
    "agreement": (agreement, "target draft questions limit max-new-tokens device dtype"),
    "papers": (papers, "drafts only limit rounds max-new-tokens device dtype markdown out plot"),
    "shapes": (shapes, "shapes context rounds max-new-tokens device dtype hf"),
}


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = arguments.pop(0) if arguments and arguments[0] in PROGRAMS else ""
    module, options = PROGRAMS[name]
    others = f"other programs, named before the options: {', '.join(filter(None, PROGRAMS))}"
    about = {"description": module.__doc__.splitlines()[0], "epilog": others}
    parser = Parser(prog=f"bench {name}".strip(), **about)
    for option in options.split():
        parser.add_argument(f"--{option}", **OPTIONS[option])
    parser.set_defaults(**getattr(module, "DEFAULTS", {}))
    args = parser.parse_args(arguments)
    args.sweep = name == "sweep"
    return run_program(parser.prog, module.report, args)


if __name__ == "__main__":
    sys.exit(main())
