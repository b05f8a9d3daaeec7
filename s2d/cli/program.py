"""What the command lines share: options, notices, and how a program ends."""

import argparse
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..checkpoint.notices import tell
from ..options import METHODS
from ..tree import GrowingShape


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def comma_separated(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    def comma_separated_list(text: str) -> tuple:  # argparse shows this name in its error
        return tuple(kind(part) for part in text.split(","))

    return comma_separated_list


def count(text: str) -> int:
    """A whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return float(text)


def parse_tree(text: str) -> tuple[int, ...] | GrowingShape:
    """4,2,2,1 -> (4, 2, 2, 1), and 6x4x60 -> GrowingShape(top_k=6, depth=4, size=60)."""
    try:
        if "x" in text:
            top_k, depth, size = map(int, text.split("x"))
            return GrowingShape(top_k, depth, size)
        return tuple(map(int, text.split(",")))
    except ValueError:
        message = f"expected widths, such as 4,2,2,1, or a growing tree, such as 6x4x60, got {text}"
        raise argparse.ArgumentTypeError(message) from None


def add_drafting_options(parser: Parser) -> None:
    """What drafts, and how: options of ``run.py``, and of a method's name in the benchmark."""
    add = parser.add_argument
    add("--draft", type=Path, help="a folder or a name; default: see s2d/cli/README.md")
    add("--method", choices=METHODS, help="ar: no draft; sd, mcsd: one exit; s2d...: sorted")
    add("--exits", type=comma_separated(int), metavar="E,E", help="draft layers; 0: n-gram table")
    add("--thresholds", type=comma_separated(float), help="confidence that is enough, per exit")
    add("--draft-length", type=int, metavar="N", help="of a chain; default: the draft's own")
    add("--tree", type=parse_tree, metavar="SHAPE", help="4,2,2,1: widths; 6x4x60: a growing tree")
    add("--stop", type=float, metavar="P", help="drafting ends below this probability")
    add(
        "--rejection",
        dest="rule",
        action="store_const",
        const="rejection",
        default="noise",
        help="sampling as in the papers",
    )
    add("--init", choices=("draft", "target"), default="draft", help="what gives a tree's roots")
    add("--decision", type=Path, metavar="FILE", help="a decision model (mcsd/)")
    add("--datastore", type=Path, metavar="FILE", help="texts for exit 0, by s2d.train text")


def run_program(name: str, function: Callable[..., int | None], *arguments: Any) -> int:
    """The exit code of ``function(*arguments)``.

    A user's mistake is one line on stderr, and 2.
    """
    warnings.showwarning = lambda message, *where: tell(message)
    try:
        code = function(*arguments) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
    except BrokenPipeError:  # whoever reads, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain at its exit
        return 141
    except (ValueError, OSError, ModuleNotFoundError) as error:
        tell(f"{name}: {error}")
        return 2
