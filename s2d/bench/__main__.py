"""The benchmark's command line: speed, unless a program is named.

python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=0.4
python -m s2d.bench hf --target weights/mini-7b
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint import DTYPES
from ..cli.program import Parser, comma_separated, count, run_program
from . import hf, papers, pays, speed


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else list(arguments))
    return run_program("python -m s2d.bench", args.report, args)


def parse(arguments: list[str]) -> Namespace:
    parser = Parser(prog="python -m s2d.bench", description="Measuring; by default: speed.")
    programs = parser.add_subparsers(metavar="PROGRAM")

    def program(name: str, module: Any, max_new_tokens: int) -> Callable[..., Any]:
        """What adds an argument to a program, which has those of all programs already."""
        what = module.__doc__
        each = programs.add_parser(name, help=what.splitlines()[0], description=what)
        each.set_defaults(report=module.report)
        add = each.add_argument
        add("--device", default="auto", help="cpu, cuda, cuda:1, mps ...; auto: CUDA if there is")
        add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's own")
        tokens = "an answer ends there (%(default)s)"
        add("--max-new-tokens", type=count, default=max_new_tokens, help=tokens)
        add("--markdown", action="store_true", help="tables as markdown")
        return add

    def add_measuring(add: Callable[..., Any], rounds: int) -> None:
        questions = "questions of each of the six groups (%(default)s)"
        add("--limit", type=count, default=2, help=questions)
        turns = "in each all rows take turns (%(default)s)"
        add("--rounds", type=count, default=rounds, help=turns)

    draft = "default: the one next to the target"
    names = comma_separated(str)
    add = program("speed", speed, max_new_tokens=128)
    add_measuring(add, rounds=3)
    add("--targets", type=names, default="7b,13b,70b", metavar="7b|PATH,...", help="models")
    add("--draft", type=Path, help=draft)
    add("--methods", nargs="+", help="such as s2d:draft_length=8:stop=0.4; default: all")
    add("--temperature", type=comma_separated(float), default="0,1", help="0 is greedy")
    add("--questions", type=Path, help="in Spec-Bench's format; default: held-out ones")
    add("--hf", action="store_true", help="transformers as well, assisted by the draft")
    add("--check", action="store_true", help="answers against ar's; exit code 1 for a bug")
    add("--out", type=Path, help="folder for answer files, as Spec-Bench's scripts read them")
    add("--plot", type=Path, metavar="FILE", help="speedups as bars: .svg, .png or .pdf")

    add = program("hf", hf, max_new_tokens=48)
    add("--target", required=True, metavar="7b|PATH", help="the folder to check")
    add("--draft", type=Path, help=draft)

    add = program("pays", pays, max_new_tokens=64)
    add_measuring(add, rounds=3)
    add("--target", required=True, metavar="7b|PATH", help="the model that writes")
    add("--draft", type=Path, help=draft)
    add("--exits", type=comma_separated(int), metavar="E,E", help="default: the draft's own")
    add("--temperature", type=comma_separated(float), default="0", help="0 is greedy")

    add = program("papers", papers, max_new_tokens=48)
    add_measuring(add, rounds=1)
    add("--drafts", type=Path, help="folder of the drafts to compare, see papers.md")
    add("--only", nargs="+", choices=papers.EXPERIMENTS, help="default: all")

    if arguments[:1] not in ([name] for name in (*programs.choices, "-h", "--help")):
        arguments = ["speed", *arguments]
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
