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


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else list(arguments))
    return run_program("python -m s2d.bench", args.run, args)


def parse(arguments: list[str]) -> Namespace:
    common = Parser(add_help=False)
    add = common.add_argument
    add("--max-new-tokens", type=count, default=128, help="of an answer (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, mps ...; auto: CUDA if there is")

    models = Parser(add_help=False)
    add = models.add_argument
    add("--target", required=True, help="a name, such as 7b, or a folder")
    add("--draft", type=Path, help="default: the one next to the target")
    add("--exits", type=comma_separated(int), help="default: the draft's own")

    measuring = Parser(add_help=False)
    add = measuring.add_argument
    numbers = comma_separated(float)
    add("--temperature", type=numbers, default="0,1", help="0 is greedy (%(default)s)")
    add("--limit", type=count, default=2, help="questions per group (%(default)s)")
    add("--rounds", type=count, default=3, help="of turns of all methods (%(default)s)")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's")

    parser = Parser(prog="python -m s2d.bench", description="Measuring; by default: speed.")
    programs = parser.add_subparsers(metavar="PROGRAM")
    for name, module, run, parents in (
        ("speed", speed, speed.measure_speed, [measuring]),
        ("hf", hf, hf.compare_with_transformers, [models]),
        ("pays", pays, pays.measure_costs, [models, measuring]),
        ("papers", papers, papers.run_experiments, [measuring]),
    ):
        about = module.__doc__
        parents.append(common)
        summary = about.splitlines()[0]
        program = programs.add_parser(name, help=summary, description=about, parents=parents)
        program.set_defaults(run=run)

    add = programs.choices["speed"].add_argument
    add("--targets", type=comma_separated(str), default="7b,13b,70b", help="names or folders")
    add("--draft", type=Path, help="default: the one next to the target")
    add("--methods", nargs="+", help="such as s2d:stop=0.4; default: all")
    add("--hf", action="store_true", help="transformers as well")
    add("--check", action="store_true", help="compare texts; exit code 1 for a bug")
    add("--questions", type=Path, help="in Spec-Bench's format")
    add("--out", type=Path, help="a folder for results.json and answers")
    add("--plot", type=Path, help="bars in a .svg, .png or .pdf")
    add = programs.choices["papers"].add_argument
    add("--only", nargs="+", choices=papers.EXPERIMENTS, help="default: those without training")
    if not arguments or arguments[0] not in (*programs.choices, "-h", "--help"):
        arguments = ["speed", *arguments]
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
