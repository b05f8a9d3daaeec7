"""What the command lines share: options, and how a program ends. Importing it is quick."""

import argparse
import json
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Name the nearest option as well, where one was typed that there is not."""
        known = re.findall(r"--[a-z][a-z-]+", self.format_help())
        typed = message if "unrecognized" in message else ""
        if "are required" in message:  # a misspelt option is not named then
            typed = " ".join(sys.argv[1:])
        for name in re.findall(r"--[a-z][a-z-]+", typed):
            is_known = any(option.startswith(name) for option in known)  # or an abbreviation
            for nearest in get_close_matches(name, known, n=1):
                if not is_known:
                    message += f"; {name}: did you mean {nearest}?"
        line = "".join(each if each.isprintable() else " " for each in message)
        self.exit(2, f"{self.prog}: {line}\n")


def comma_separated(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    def parse(text: str) -> tuple:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            words = f"expected one, or several with commas between them, got {text!r}"
            raise argparse.ArgumentTypeError(words) from None

    return parse


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


def parse_tree(text: str) -> Any:
    """4,2,2,1 -> (4, 2, 2, 1), and 6x4x60 -> GrowingShape(top_k=6, depth=4, size=60)."""
    from ..tree import GrowingShape

    try:
        if "x" in text:
            top_k, depth, size = map(int, text.split("x"))
            return GrowingShape(top_k, depth, size)
        return tuple(map(int, text.split(",")))
    except ValueError:
        message = f"expected widths, such as 4,2,2,1, or a growing tree, such as 6x4x60, got {text}"
        raise argparse.ArgumentTypeError(message) from None


def named_value(text: str) -> tuple[str, Any]:
    """enable_thinking=false -> ("enable_thinking", False). What is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def add_drafting_options(parser: Any) -> None:
    """What drafts, and how: for a group of ``run.py``, or a method's name in the benchmark."""
    add = parser.add_argument
    add("--draft", type=Path, metavar="NAME|FOLDER", help="the small model (next to the target)")
    methods = "ar", "sd", "mcsd", "s2d", "s2d-tree"
    words = "ar: no draft; sd, mcsd: chain, tree of one exit; s2d, s2d-tree: of sorted exits (s2d)"
    add("--method", choices=methods, help=words)
    words = "the layers after which it predicts; 0: n-gram table"
    add("--exits", type=comma_separated(int), metavar="E,E", help=words)
    words = "the confidence that is enough, per exit"
    add("--thresholds", type=comma_separated(float), metavar="C,C", help=words)
    add("--draft-length", type=int, metavar="N", help="tokens in a chain")
    words = "widths, such as 4,2,2,1, or a growing tree, such as 6x4x60"
    add("--tree", type=parse_tree, metavar="SHAPE", help=words)
    words = "a path of a lower probability is not continued"
    add("--stop", type=float, metavar="P", help=words)
    words = "rejection sampling, as in the papers (shared noise)"
    add("--rejection", dest="rule", action="store_const", const="rejection", help=words)
    add("--init", choices=("draft", "target"), help="what proposes the first level (draft)")
    add("--decision", type=Path, metavar="FILE", help="a model of where drafting stops (none)")
    words = "texts for exit 0, by s2d.train text (next to the target)"
    add("--datastore", type=Path, metavar="FILE", help=words)


def name_processor() -> str:
    """As Linux calls it; elsewhere, as Python does."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def run_program(name: str, function: Callable[..., int | None], *arguments: Any) -> int:
    """The exit code of ``function(*arguments)``.

    A user's mistake is one line on stderr, and 2.
    """
    # A stream that the shell closed is None. What is written to it is for nobody.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdin = sys.stdin or open(os.devnull)
    from ..checkpoint.notices import tell

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
        words = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            words = f"{error.filename}: {error.strerror}"
        # An option as it was typed: ``Options`` call it top_p.
        words = re.sub(r"^[a-z_]+: expected", lambda it: f"--{it[0].replace('_', '-')}", words)
        tell(f"{name}: {words}")
        return 2
