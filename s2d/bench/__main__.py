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

PROGRAMS = {
    "speed": speed.measure_speed,
    "hf": hf.compare_with_transformers,
    "pays": pays.measure_costs,
    "papers": papers.run_experiments,
}


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else list(arguments))
    return run_program(f"python -m s2d.bench {args.program}", PROGRAMS[args.program], args)


def parse(arguments: list[str]) -> Namespace:
    """The options of one program: of the first word, if that is the name of one."""
    name = "speed"
    if arguments and arguments[0] in PROGRAMS:
        name, *arguments = arguments
    about = sys.modules[PROGRAMS[name].__module__].__doc__
    more = f"The programs are {', '.join(PROGRAMS)}: python -m s2d.bench PROGRAM --help"
    parser = Parser(f"python -m s2d.bench {name}", description=about, epilog=more)
    parser.set_defaults(program=name)
    add = parser.add_argument
    if name == "papers":
        add("--only", nargs="+", choices=papers.EXPERIMENTS, help="default: those without training")
        parser.set_defaults(draft=None)
    else:
        names = comma_separated(str)
        add("--target", type=names, default="7b,13b,70b", help="names or folders (%(default)s)")
        add("--draft", type=Path, help="default: the one next to the target")
    if name in ("hf", "pays"):
        add("--exits", type=comma_separated(int), help="default: the draft's own")
    if name == "speed":
        add("--methods", nargs="+", help="such as s2d:stop=0.4; default: all")
        add("--hf", action="store_true", help="transformers as well")
        add("--check", action="store_true", help="compare texts; exit code 1 if one differs")
        add("--questions", type=Path, help="in Spec-Bench's format")
        add("--out", type=Path, help="a folder for results.json and answers")
        add("--plot", type=Path, help="bars in a .svg, .png or .pdf")
    limit, rounds = 2, 3
    if name == "hf":  # which takes no means
        limit, rounds = 1, 1
        parser.set_defaults(temperature=(0.0,), dtype="float64")
    else:
        numbers = comma_separated(float)
        add("--temperature", type=numbers, default="0,1", help="0 is greedy (%(default)s)")
        add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's")
    add("--rounds", type=count, default=rounds, help="of turns of all methods (%(default)s)")
    add("--limit", type=count, default=limit, help="questions per group (%(default)s)")
    add("--max-new-tokens", type=count, default=128, help="of an answer (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, mps ...; auto: CUDA if there is")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
