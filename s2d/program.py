"""What the command lines share."""

import argparse
import importlib
import io
import os
import sys

import torch


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before them."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


def one_line(message):
    """A message in one line, whatever a user's words in it hold; a terminal obeys none of it."""
    text = " ".join(str(message).split())
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def optional(package, where):
    """A package that is not among the requirements; ValueError says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        needed = f"this needs the package {error.name}, which is not installed"
        raise ValueError(f"{needed}: pip install {where}") from None


def prepare_streams():
    """Make stdout and stderr take all that a program says; ValueError where stdout is closed."""
    if sys.stderr is None:  # closed: print would send notices to stdout
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        raise ValueError("stdout is closed, so all output would be lost; send it somewhere")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # letters that its encoding lacks become escapes
            stream.reconfigure(errors="backslashreplace")


def read_stdin():
    """The text on stdin. Raises ValueError where it is closed, or not UTF-8."""
    if sys.stdin is None:
        raise ValueError("the prompt is to come from stdin, which is closed; give it with --prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        said = f"the prompt on stdin is not UTF-8 (byte {error.start})"
        raise ValueError(f"{said}; convert it first") from None


def discard_unwritten():
    """Where stdout takes no more, drop what waits for it: Python would try again at its exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_program(name, function, *arguments):
    """Exit code of ``function(*arguments)``; a user's mistake is one line on stderr, and 2."""
    try:
        prepare_streams()
        code = function(*arguments) or 0
        sys.stdout.flush()  # a full disk is found here, or only after the exit code
        return code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        reason = error
        discard_unwritten()
    except (MemoryError, RuntimeError) as error:
        reason = ". ".join(str(error).split(". ")[:2])  # the rest is about PyTorch's allocator
        out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not out_of_memory and "allocate memory" not in reason:
            raise
        reason = reason or "out of memory"
        reason += "; weights/README.md tells what a model needs and how to divide it"
    print(f"{name}: {one_line(reason)}", file=sys.stderr)
    return 2
