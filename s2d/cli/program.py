"""The options that command lines share, without PyTorch."""

import argparse
import json
import platform
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        line = "".join(each if each.isprintable() else " " for each in message)
        self.exit(2, f"{self.prog}: {line}\n")


def comma_separated(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    """What reads one value or several, with commas between them."""

    def parse(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"list of {kind.__name__}"  # argparse says this in its errors
    return parse


def number_in(kind: type, least: float, most: float) -> Callable[[str], Any]:
    """What reads a number of a ``kind``, int or float, in a range."""

    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            words = f"expected a number from {least} to {most}, got {text:.40}"
            raise argparse.ArgumentTypeError(words)
        return value

    return number


whole = partial(number_in, int)
count = whole(1, 10**6)
positive = number_in(float, 1e-9, 1e9)


def file_name(text: str) -> Path:
    """A path that says something: no name at all would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got ''")
    return Path(text)


def parse_tree(text: str) -> Any:
    """4,2,2,1 -> (4, 2, 2, 1), and 6x4x60 -> GrowingShape(top_k=6, depth=4, size=60)."""
    from ..tree import GrowingShape

    is_growing = "x" in text
    try:
        numbers = tuple(map(int, text.split("x" if is_growing else ",")))
        return GrowingShape(*numbers) if is_growing else numbers
    except (ValueError, TypeError):
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
    words = "the small model (next to the target)"
    add("--draft", type=file_name, metavar="NAME|FOLDER", help=words)
    methods = "ar", "sd", "mcsd", "s2d", "s2d-tree"
    words = "ar: no draft; sd, mcsd: chain, tree of one exit; s2d, s2d-tree: of sorted exits (s2d)"
    add("--method", choices=methods, help=words)
    words = "the layers after which it predicts; 0: n-gram table"
    add("--exits", type=comma_separated(int), metavar="E,E", help=words)
    words = "the confidence that is enough, per exit"
    add("--thresholds", type=comma_separated(float), metavar="C,C", help=words)
    add_shape = parser.add_mutually_exclusive_group().add_argument
    add_shape("--draft-length", type=int, metavar="N", help="tokens in a chain")
    words = "widths, such as 4,2,2,1, or a growing tree, such as 6x4x60"
    add_shape("--tree", type=parse_tree, metavar="SHAPE", help=words)
    words = "a path of a lower probability is not continued"
    add("--stop", type=float, metavar="P", help=words)
    words = "rejection sampling, as in the papers (shared noise)"
    add("--rejection", dest="rule", action="store_const", const="rejection", help=words)
    words = "every pass of the target in one size: equal to ar --bitwise in any dtype, bit for bit"
    add("--bitwise", action="store_true", default=None, help=words)
    add("--init", choices=("draft", "target"), help="what proposes the first level (draft)")
    add("--decision", type=file_name, metavar="FILE", help="a model of where drafting stops (none)")
    words = "texts for exit 0, by s2d.train text (next to the target)"
    add("--datastore", type=file_name, metavar="FILE", help=words)


def name_processor() -> str:
    """As Linux calls it; elsewhere, as Python does."""
    file = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", file.read_text()) if file.is_file() else None
    return found[1] if found else platform.processor()
