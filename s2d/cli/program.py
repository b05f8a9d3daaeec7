"""What the command lines share: options, notices, and how a program ends."""

import argparse
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from ..model import Llama
from ..tree import GrowingShape

# How safetensors and PyTorch say that a file cannot be written.
DISK = "No space left on device", "PytorchStreamWriter failed", "iostream error", "unexpected pos"
PROGRESS_SECONDS = 10  # between two notices of a long run


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, without the usage before it
        self.exit(2, f"{self.prog}: {message}\n")


def comma_separated(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    def comma_separated_list(text):  # argparse shows this name in its error
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
    if "x" in text:
        top_k, depth, size = map(int, text.split("x"))
        return GrowingShape(top_k, depth, size)
    return tuple(map(int, text.split(",")))


def parse_stop(text: str) -> float | str:
    """A probability, or the name of a decision model's file."""
    try:
        return float(text)
    except ValueError:
        return text


def tell(message: Any) -> None:
    """A notice, one line on stderr; one that nobody can read costs no answer."""
    with suppress(OSError):
        print(" ".join(str(message).split()), file=sys.stderr, flush=True)


def progress(items: Iterable, what: str, total: int | None = None) -> Iterator:
    """Yield ``items``; of what takes long, tell every ten seconds how far it is."""
    began = told = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - told >= PROGRESS_SECONDS:
            told = now
            rate = done / (now - began)
            line = f"{what}: {done} of {total}" if total else f"{what}: {done}"
            line += f", {rate:.0f} per second" if rate >= 10 else f", {rate:.2g} per second"
            if total and rate:
                line += f", {timedelta(seconds=round((total - done) / rate))} left"
            tell(line)
        yield item


def tell_of_next_pass(model: Llama, what: str) -> None:
    """Tell how far the next pass of ``model`` is, layer by layer, if it takes long."""
    layers = model.model.layers
    done = progress(layers, what, len(layers))
    next(done)  # the first layer begins

    def count_layer(*_: Any) -> None:
        next(done, None)

    hooks = [layer.register_forward_hook(count_layer) for layer in layers]

    def remove_all(*_: Any) -> None:
        for hook in hooks:
            hook.remove()

    hooks.append(layers[-1].register_forward_hook(remove_all))


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
    """Streams that the caller closed lead nowhere, and no character ends one.

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


def lack_of_room(error: Exception) -> str:
    """One line about memory or a disk that is full; "" for any other error.

    PyTorch and safetensors have no class of their own for these, but for a GPU's memory.
    """
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or "out of memory" in first or "allocate memory" in first:
        return f"there is not enough memory ({first or 'MemoryError'})"
    if any(words in str(error) for words in DISK):
        return f"the disk is full, or cannot be written to ({first})"
    return ""
