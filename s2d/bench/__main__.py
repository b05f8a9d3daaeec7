"""The benchmark's command line: speed, unless a program is named.

python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=0.4
python -m s2d.bench hf --target weights/mini-7b
"""

import sys
from argparse import Namespace
from pathlib import Path

from ..checkpoint import DTYPES
from ..cli.program import Parser, comma_separated, count, run_program
from . import hf, papers, pays, speed

MODEL = "a name, such as 7b, or a folder"
NUMBERS = comma_separated(float)
OPTIONS = {
    "--targets": dict(type=comma_separated(str), default="7b,13b,70b", help=MODEL),
    "--target": dict(required=True, help=MODEL),
    "--draft": dict(type=Path, help="default: the one next to the target"),
    "--exits": dict(type=comma_separated(int), help="default: the draft's own"),
    "--methods": dict(nargs="+", help="such as s2d:stop=0.4; default: all"),
    "--temperature": dict(type=NUMBERS, default="0,1", help="0 is greedy"),
    "--limit": dict(type=count, default=2, help="questions per group (%(default)s)"),
    "--rounds": dict(type=count, default=3, help="of turns of all methods (%(default)s)"),
    "--questions": dict(type=Path, help="in Spec-Bench's format"),
    "--hf": dict(action="store_true", help="transformers as well"),
    "--check": dict(action="store_true", help="compare texts; exit code 1 for a bug"),
    "--out": dict(type=Path, help="a folder for results.json and answers"),
    "--plot": dict(type=Path, help="bars in a .svg, .png or .pdf"),
    "--only": dict(nargs="+", choices=papers.EXPERIMENTS, help="default: those without training"),
    "--max-new-tokens": dict(type=count, help="of an answer (%(default)s)"),
    "--device": dict(default="auto", help="cpu, cuda, mps ...; auto: CUDA if there is"),
    "--dtype": dict(default="auto", choices=("auto", *DTYPES), help="auto: the model's"),
}
MODELS = ("--target", "--draft", "--exits")
MEASURING = ("--temperature", "--limit", "--rounds", "--dtype")
FILES = ("--questions", "--out", "--plot")
PROGRAMS = {
    "speed": ("--targets", "--draft", "--methods", *MEASURING, "--hf", "--check", *FILES),
    "hf": MODELS,
    "pays": (*MODELS, *MEASURING),
    "papers": ("--only", *MEASURING),
}
DEFAULTS = {
    "speed": dict(run=speed.measure_speed, max_new_tokens=128),
    "hf": dict(run=hf.compare_with_transformers, max_new_tokens=48),
    "pays": dict(run=pays.measure_costs, max_new_tokens=64, temperature="0"),
    "papers": dict(run=papers.run_experiments, max_new_tokens=48, rounds=1),
}


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else list(arguments))
    return run_program("python -m s2d.bench", args.run, args)


def parse(arguments: list[str]) -> Namespace:
    parser = Parser(prog="python -m s2d.bench", description="Measuring; by default: speed.")
    programs = parser.add_subparsers(metavar="PROGRAM")
    for module in (speed, hf, pays, papers):
        name = module.__name__.rpartition(".")[2]
        about = module.__doc__
        program = programs.add_parser(name, help=about.splitlines()[0], description=about)
        for option in (*PROGRAMS[name], "--max-new-tokens", "--device"):
            program.add_argument(option, **OPTIONS[option])
        program.set_defaults(**DEFAULTS[name])
    if not arguments or arguments[0] not in (*PROGRAMS, "-h", "--help"):
        arguments = ["speed", *arguments]
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
