"""The animated picture of two answers, and pages for a web server, of the miniatures."""

import sys
from argparse import Namespace
from pathlib import Path

from ..checkpoint import load_model
from ..checkpoint.names import WEIGHTS
from ..checkpoint.tokenizer import Tokenizer
from ..cli.program import Parser, count, run_program
from ..files import refuse_existing, refuse_other_than_file
from ..model import Llama
from .pages import write_pages
from .race import ROUNDS, write_race

TARGET = WEIGHTS / "mini-13b"
DRAFT = WEIGHTS / "mini-draft"


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return run_program("trace", args.make, args)


def parse(arguments: list[str] | None) -> Namespace:
    parser = Parser(prog="python -m s2d.trace", description=__doc__)
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")
    race = programs.add_parser("race", help="the target alone and S2D, as an animated picture")
    race.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    race.add_argument("--rounds", type=count, default=ROUNDS, help="of timing; medians count")
    race.set_defaults(make=make_race)
    pages = programs.add_parser("pages", help="a folder of pages that a web server can serve")
    pages.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    pages.set_defaults(make=make_pages)
    return parser.parse_args(arguments)


def make_race(args: Namespace) -> None:
    refuse_other_than_file(args.out)
    write_race(**load_miniatures(), rounds=args.rounds, file=args.out)


def make_pages(args: Namespace) -> None:
    refuse_existing(args.out)
    names = {"target": TARGET.name, "draft": DRAFT.name}
    write_pages(**load_miniatures(), names=names, folder=args.out)


def load_miniatures() -> dict[str, Llama | Tokenizer]:
    """What ``write_race`` and ``write_pages`` both take."""
    return {
        "target": load_model(TARGET),
        "draft": load_model(DRAFT),
        "tokenizer": Tokenizer(TARGET),
    }


if __name__ == "__main__":
    sys.exit(main())
