"""What the command lines share."""

import argparse
import importlib
import io
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from .ctrl_c import end_at_once

# What a terminal would obey, all but line breaks and tabs -> how it is shown.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


@contextmanager
def raised_on_ctrl_c():
    """KeyboardInterrupt instead of ``end_at_once``: what was begun is put away, or shown."""
    before = signal.getsignal(signal.SIGINT)
    try:
        if before is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        if before is end_at_once:
            signal.signal(signal.SIGINT, before)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before them."""

    def error(self, message):
        tell(f"{self.prog}: {message}")
        self.exit(2)


def path(text):
    """A path on a command line; argparse says "invalid path value" of one without a name."""
    if not text:
        raise ValueError
    return Path(text)


def seed(text):
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^63 - 1, not {text}")
    return int(text)


def comma_separated(kind):
    def read(text):
        return tuple(kind(part) for part in text.split(","))

    read.__name__ = f"comma-separated {kind.__name__}"  # argparse names it in its error
    return read


def one_line(message):
    """A message in one line, whatever a user's words in it hold; a terminal obeys none of it."""
    text = " ".join(str(message).split())
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def tell(message, end="\n"):
    """A notice, one line on stderr; where stderr takes no more it is lost, and nothing else."""
    with suppress(OSError):
        print(one_line(message), end=end, file=sys.stderr)
    discard_unwritten(sys.stderr)


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


def discard_unwritten(stream):
    """Where a stream takes no more, drop what waits for it: Python would try again at its exit."""
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run_program(name, function, *arguments):
    """Exit code of ``function(*arguments)``; a user's mistake is one line on stderr, and 2."""
    try:
        with raised_on_ctrl_c():
            prepare_streams()
            code = function(*arguments) or 0
            sys.stdout.flush()  # a full disk is found here, or only after the exit code
        return code
    except KeyboardInterrupt:
        tell(f"{name}: interrupted")
        return 130
    except BrokenPipeError:  # who reads it has enough, such as head
        discard_unwritten(sys.stdout)
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        reason = error
        discard_unwritten(sys.stdout)
    except (MemoryError, RuntimeError) as error:
        from torch import OutOfMemoryError

        reason = ". ".join(str(error).split(". ")[:2])  # the rest is about PyTorch's allocator
        out_of_memory = isinstance(error, (MemoryError, OutOfMemoryError))
        if not out_of_memory and "allocate memory" not in reason:
            raise
        reason = reason or "out of memory"
        reason += "; weights/README.md tells what a model needs and how to divide it"
    tell(f"{name}: {reason}")
    return 2
