"""What the command lines share: options, notices, and how a program ends."""

import argparse
import io
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..files import lack_of_room
from ..notices import tell
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


def parse_stop(text: str) -> float | str:
    """A probability, or the name of a decision model's file."""
    try:
        return float(text)
    except ValueError:
        return text


def add_drafting_options(parser: Parser) -> None:
    """What drafts, and how: options of ``run.py``, and of a method's name in the benchmark."""
    add = parser.add_argument
    add("--draft", type=Path, help="a folder or a name; default: see s2d/cli/README.md")
    add("--method", choices=METHODS, help="ar: no draft; sd, mcsd: one exit; s2d...: sorted")
    add("--exits", type=comma_separated(int), metavar="E,E", help="draft layers; 0: n-gram table")
    add("--thresholds", type=comma_separated(float), help="confidence that is enough, per exit")
    add("--draft-length", type=int, metavar="N", help="of a chain; default: the draft's own")
    add("--tree", type=parse_tree, metavar="SHAPE", help="4,2,2,1: widths; 6x4x60: a growing tree")
    init = "what proposes the first level of a tree"
    add("--init", choices=("draft", "target"), default="draft", help=init)
    stop = "drafting ends below this probability; or a decision model"
    add("--stop", type=parse_stop, metavar="P|FILE", help=stop)
    add(
        "--rejection",
        dest="rule",
        action="store_const",
        const="rejection",
        default="noise",
        help="sampling as in the papers",
    )


def run_program(name: str, function: Callable[..., int | None], *arguments: Any) -> int:
    """The exit code of ``function(*arguments)``.

    A user's mistake, a full disk and memory that is not there are one line on stderr, and 2.
    """
    open_streams()
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
    except Exception as error:
        reason = lack_of_room(error)
        if not reason:
            raise
        tell(f"{name}: {reason}")
        return 2


def open_streams() -> None:
    """Closed streams become /dev/null, and no character raises that cannot be decoded or encoded.

    Without this, Python would print notices to stdout when stderr is closed. Input is UTF-8 with or
    without a byte order mark, as files are; what is not, the tokenizer refuses line by line.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
