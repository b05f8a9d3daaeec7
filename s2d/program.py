"""What the command lines share."""

import argparse
import importlib
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
    """A package that is not among the requirements, imported; ValueError with what to install where it is not there."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this needs the package {error.name}, which is not installed: pip install {where}"
        ) from None


def run_program(name, function, *arguments):
    """Exit code of ``function(*arguments)``: its own, or 0. A user's mistake is one line on stderr and exit code 2."""
    try:
        return function(*arguments) or 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        reason = error
    except (MemoryError, RuntimeError) as error:
        reason = (
            ". ".join(str(error).split(". ")[:2]) or "out of memory"
        )  # the rest is about PyTorch's allocator
        if (
            not isinstance(error, (MemoryError, torch.OutOfMemoryError))
            and "allocate memory" not in reason
        ):
            raise
        reason += "; weights/README.md tells what a model needs and how to divide it"
    print(f"{name}: {one_line(reason)}", file=sys.stderr)
    return 2
