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
from ..cli.program import Parser, comma_separated, count, positive, run_program
from . import drafts, exit0, hf, papers, pays, speed
from .experiments import EXPERIMENTS


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else list(arguments))
    return run_program("bench", args.report, args)


def parse(arguments: list[str]) -> Namespace:
    parser = Parser(prog="python -m s2d.bench", description="Measuring; by default: speed.")
    programs = parser.add_subparsers(metavar="PROGRAM")

    def program(
        name: str, report: Callable[[Namespace], int | None], what: str
    ) -> Callable[..., Any]:
        """What adds an argument to a program, which has --device already."""
        each = programs.add_parser(name, help=what.splitlines()[0], description=what)
        each.set_defaults(report=report)
        add = each.add_argument
        add("--device", default="auto", help="cpu, cuda, cuda:1, mps ...; auto: CUDA if there is")
        return add

    def measuring(
        name: str, report: Callable[[Namespace], int | None], what: str, max_new_tokens: int
    ) -> Callable[..., Any]:
        """As ``program``, for one that has the arguments of all that measure already."""
        add = program(name, report, what)
        add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's own")
        questions = "questions of each of the six groups (%(default)s)"
        add("--limit", type=count, default=2, help=questions)
        tokens = "an answer ends there (%(default)s)"
        add("--max-new-tokens", type=count, default=max_new_tokens, help=tokens)
        add("--markdown", action="store_true", help="tables as markdown")
        return add

    rounds = "in each all rows take turns (%(default)s)"

    add = measuring("speed", speed.report, speed.__doc__, max_new_tokens=128)
    names = comma_separated(str)
    add("--targets", type=names, default="7b,13b,70b", metavar="7b|PATH,...", help="models")
    add("--draft", type=Path, help="default: the one next to the first target")
    add("--methods", nargs="+", help="such as s2d:draft_length=8:stop=0.4; default: all")
    add("--temperature", type=comma_separated(float), default="0,1", help="0 is greedy")
    add("--questions", type=Path, help="in Spec-Bench's format; default: held-out ones")
    add(
        "--hf",
        action="store_true",
        help="transformers as well, assisted by the first draft there is",
    )
    add("--graphs", action="store_true", help="every method by CUDA graphs as well (untried)")
    add("--batch", type=comma_separated(count), metavar="N,...", help="also N prompts at once")
    add("--check", action="store_true", help="answers against ar's; exit code 1 for a bug")
    add("--out", type=Path, help="folder for answer files, as Spec-Bench's scripts read them")
    add("--plot", type=Path, metavar="FILE.svg", help="the last table as a picture")
    add("--rounds", type=count, default=3, help=rounds)

    add = measuring("hf", hf.report, hf.__doc__, max_new_tokens=48)
    add("--target", required=True, metavar="7b|PATH", help="the folder to check")
    add("--draft", type=Path, help="default: the one next to the target, or exit 0")

    add = measuring("exit0", exit0.report, exit0.__doc__, max_new_tokens=128)
    add("--target", required=True, metavar="7b|PATH", help="the model")

    add = measuring("pays", pays.report, pays.__doc__, max_new_tokens=48)
    add("--target", required=True, metavar="7b|PATH", help="the model")
    add("--draft", type=Path, help="default: the one next to the target, or exit 0")
    add("--exits", type=comma_separated(int), metavar="E,E", help="default: the draft's own")
    add("--temperature", type=comma_separated(float), default="0", help="0 is greedy")
    add("--graphs", action="store_true", help="passes as CUDA graphs, on a CUDA GPU (untried)")
    add("--rounds", type=count, default=2, help=rounds)

    add = measuring("papers", papers.report, papers.__doc__, max_new_tokens=48)
    add("--drafts", type=Path, metavar="DIR", help="what python -m s2d.bench papers train made")
    add("--only", nargs="+", choices=EXPERIMENTS, metavar="NAME", help="of these")
    add("--out", type=Path, metavar="DIR", help="keeps what was measured; used again")
    add("--rounds", type=count, default=1, help=rounds)

    add = program("papers train", drafts.train, drafts.__doc__)
    add("--out", type=Path, default=Path("drafts"), help="folder for all of them")
    add("--resume", action="store_true", help="go on where it was cut short")
    millions = "million training tokens of each"
    add("--millions", type=positive, default=drafts.MILLIONS, help=millions)
    add("--seed", type=int, default=0, help="of all random numbers")

    if arguments[:2] == ["papers", "train"]:
        arguments = ["papers train", *arguments[2:]]  # for argparse a name is one word
    if arguments[:1] not in ([name] for name in (*programs.choices, "-h", "--help")):
        arguments = ["speed", *arguments]
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
