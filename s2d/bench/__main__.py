"""The benchmark's command line: speed, or a subcommand, ``papers`` or ``exit0``.

python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=decision
"""

import sys
from argparse import ArgumentTypeError
from pathlib import Path

from ..program import Parser, comma_separated, run_program
from ..weights import DTYPES
from . import exit0, papers, speed

ROUNDS = "in each all methods take turns (%(default)s)"


def count(text):
    if int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["papers"]:
        parser, report = Parser("bench papers", description=papers.__doc__), papers.report
        arguments = arguments[1:]
        add = parser.add_argument
        add("--drafts", type=Path, metavar="DIR", help="what python -m s2d.train ablations made")
        add("--only", nargs="+", choices=papers.EXPERIMENTS, metavar="NAME", help="of these")
        add("--out", type=Path, metavar="DIR", help="keeps what was measured; used again")
        add("--rounds", type=count, help=ROUNDS)
        parser.set_defaults(limit=2, rounds=1, max_new_tokens=48)
    elif arguments[:1] == ["exit0"]:
        parser, report = Parser("bench exit0", description=exit0.__doc__), exit0.report
        arguments = arguments[1:]
        add = parser.add_argument
        add("--target", required=True, metavar="7b|PATH", help="the model")
        parser.set_defaults(limit=2, max_new_tokens=128)
    else:
        parser, report = Parser("bench", description=speed.__doc__), speed.report
        add = parser.add_argument
        names = comma_separated(str)
        add("--targets", type=names, default="7b,13b,70b", metavar="7b|PATH,...", help="models")
        add("--draft", type=Path, help="default: the one next to the first target")
        add("--methods", nargs="+", help="such as s2d:draft_length=8:stop=0.4; default: all")
        add("--temperature", type=comma_separated(float), default="0,1", help="0 is greedy")
        add("--questions", type=Path, help="in Spec-Bench's format; default: held-out ones")
        add("--hf", action="store_true", help="transformers as well")
        add("--compile", action="store_true", help="every method compiled as well; on CUDA untried")
        several = "every method with so many prompts at once as well"
        add("--batch", type=comma_separated(count), default=(), metavar="N,...", help=several)
        add("--check", action="store_true", help="answers against ar's; exit code 1 for a bug")
        add("--out", type=Path, help="folder for answer files, as Spec-Bench's scripts read them")
        add("--plot", type=Path, metavar="FILE.svg", help="the last table as a picture")
        add("--rounds", type=count, help=ROUNDS)
        parser.set_defaults(limit=2, rounds=3, max_new_tokens=128)
    add("--limit", type=count, help="questions of each of the six groups (%(default)s)")
    add("--max-new-tokens", type=count, help="an answer ends there (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, cuda:1 ...; auto: a GPU if there is one")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's own")
    add("--markdown", action="store_true", help="tables as markdown")
    return run_program(parser.prog, report, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
