"""What the command lines share: a user's mistake is one line, notices go to stderr."""

import argparse
import importlib
import os
import sys

from .tree import Dynamic

# What a terminal would obey, all but line breaks and tabs -> how it is shown.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before them."""

    def error(self, message):
        tell(f"{self.prog}: {message}")
        self.exit(2)


def comma_separated(kind):
    def read(text):
        return tuple(kind(part) for part in text.split(","))

    read.__name__ = f"comma-separated {kind.__name__}"  # argparse names it in its error
    return read


def parse_tree(text):
    """A tree's shape as it is written on a command line; ValueError where it is none.

    >>> parse_tree("4,2,2,1"), parse_tree("6x4x60")
    ((4, 2, 2, 1), Dynamic(top_k=6, depth=4, size=60))
    """
    try:
        if "x" in text:
            return Dynamic(*map(int, text.split("x")))
        return tuple(map(int, text.split(",")))
    except (TypeError, ValueError):
        forms = "4,2,2,1 (children per level) or 6x4x60 (top-k x depth x size)"
        raise ValueError(f"a tree is written {forms}, not {text!r}") from None


def read_stop(text, draft=None):
    """What a command line gives as ``stop``: a probability, or the file of a decision model."""
    try:
        return float(text)
    except ValueError:
        from .extras.decision import PathStop, load_decision

        return PathStop(load_decision(text, draft))


def one_line(message):
    """A message in one line, whatever a user's words in it hold; a terminal obeys none of it."""
    text = " ".join(str(message).split())
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def tell(message, end="\n"):
    """A notice, one line on stderr."""
    print(one_line(message), end=end, file=sys.stderr)


def optional(package, requirement):
    """A package that is not among the requirements; ValueError says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        needed = f"this needs the package {error.name}, which is not installed"
        raise ValueError(f"{needed}: pip install {requirement}") from None


def run_program(name, function, *arguments):
    """Exit code of ``function(*arguments)``; a user's mistake is one line on stderr, and 2."""
    try:
        code = function(*arguments) or 0
        print(end="", flush=True)  # a full disk is noticed here and not at Python's exit
        return code
    except KeyboardInterrupt:
        tell(f"{name}: interrupted")
        return 130
    except BrokenPipeError:  # whoever reads, such as head, has enough
        drop_unwritten()
        return 141
    except (ValueError, OSError) as error:
        drop_unwritten()
        tell(f"{name}: {error}")
    except (MemoryError, RuntimeError) as error:
        message = str(error).split(". ")[0] or "out of memory"  # the rest is about the allocator
        if "memory" not in message:
            raise
        tell(f"{name}: {message}; weights/README.md says what a model needs")
    return 2


def drop_unwritten():
    """Python would try again at its exit to write what stdout does not take."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
