"""The benchmark's command line: speed, unless a program is named.

python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=0.4
python -m s2d.bench hf --target weights/mini-7b
"""

import shlex
import sys
from argparse import Namespace
from importlib import import_module

from ..cli.ending import run_program

PROGRAMS = "speed", "hf", "papers"  # each is a module with a function main


def main(arguments: list[str] | None = None) -> int:
    return run_program("python -m s2d.bench", run, arguments)


def run(arguments: list[str] | None) -> int | None:
    args = parse(sys.argv[1:] if arguments is None else list(arguments))
    return import_module(f"s2d.bench.{args.program}").main(args)


def parse(arguments: list[str]) -> Namespace:
    """The options of one program: of the first word, if that is the name of one."""
    from ..checkpoint.config import DTYPES
    from ..cli.program import Parser, comma_separated, count, file_name, whole

    name = "speed"
    if arguments and arguments[0] in PROGRAMS:
        name, *arguments = arguments
    program = import_module(f"s2d.bench.{name}")
    more = f"The programs are {', '.join(PROGRAMS)}: python -m s2d.bench PROGRAM --help"
    parser = Parser(f"python -m s2d.bench {name}", description=program.__doc__, epilog=more)
    command = f"python -m s2d.bench {name} {shlex.join(arguments)}"
    parser.set_defaults(program=name, command=command)
    add = parser.add_argument
    if name == "papers":
        add("--only", nargs="+", choices=program.EXPERIMENTS, help="else: those without training")
        parser.set_defaults(draft=None)
    else:
        names = comma_separated(str)
        add("--target", type=names, default="7b,13b,70b", help="names or folders (%(default)s)")
        add("--draft", type=file_name, help="default: the one next to the target")
    if name == "speed":
        add("--methods", nargs="+", help="such as s2d:stop=0.4; default: all")
        add("--hf", action="store_true", help="transformers as well")
        add("--check", action="store_true", help="compare texts; exit code 1 if one differs")
        add("--questions", type=file_name, help="in Spec-Bench's format")
        add("--out", type=file_name, help="a folder for results.json and answers")
        add("--plot", type=file_name, help="bars in a .svg, .png or .pdf")
    limit, rounds = (1, 1) if name == "hf" else (2, 3)
    if name == "hf":  # which takes no means
        add("--exits", type=comma_separated(int), help="default: the draft's own")
        parser.set_defaults(temperature=(0.0,), dtype="float64", top_p=1.0, top_k=0, seed=0)
    else:
        numbers = comma_separated(float)
        add("--temperature", type=numbers, default="0,1", help="0 is greedy (%(default)s)")
        add("--top-p", type=float, default=1.0, help="nucleus sampling (%(default)s: all tokens)")
        add("--top-k", type=int, default=0, help="draw from the K likeliest (%(default)s: all)")
        add("--seed", type=whole(0, 2**32 - 1), default=0, help="of all answers (%(default)s)")
        add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's")
    add("--rounds", type=count, default=rounds, help="of turns of all methods (%(default)s)")
    add("--limit", type=count, default=limit, help="questions per group (%(default)s)")
    add("--max-new-tokens", type=count, default=128, help="of an answer (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, mps ...; auto: CUDA if there is")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
