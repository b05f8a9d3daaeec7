"""How a program ends. Importing this is quick, so that Ctrl-C is one line almost from the start."""

import atexit
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType

from ..checkpoint.notices import tell


def run_program(name: str, function: Callable[..., int | None], *arguments: object) -> int:
    """The exit code of ``function(*arguments)``, which imports what it needs itself.

    One line on stderr, and 2: a user's mistake, a missing package, a full disk or too little
    memory. One line, and 130: Ctrl-C. No line, and 141: whoever reads, such as head, has enough.
    Without ``arguments`` the program has no options, and anything that is typed is refused.
    """
    try:
        try:
            prepare()
            if not arguments:
                from .program import Parser

                Parser(prog=name, description=function.__doc__).parse_args()
            return function(*arguments) or 0
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
    except BrokenPipeError:
        drop_output()
        return 141
    except (ValueError, OSError, ModuleNotFoundError, MemoryError, RuntimeError) as error:
        words = in_one_line(error)
        drop_output()
        tell(f"{name}: {words}")
        return 2


def prepare() -> None:
    """Ctrl-C is heard, whatever is written can be written, and a warning is one line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the program has ended
    # A stream that the shell closed is None. What is written to it is for nobody.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdin = sys.stdin or open(os.devnull)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In an old code page, which lacks the character, 日 becomes \u65e5.
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *where: tell(message)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C is an exception; while a package is imported, which may lose it, the program ends."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def drop_output() -> None:
    """What could not be written goes nowhere, or Python would complain at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def in_one_line(error: Exception) -> str:
    """What a user should know about an error; a fault of the program itself is raised again."""
    words = "allocate memory" in str(error)  # as PyTorch and safetensors say it on a CPU
    if words or type(error).__name__ in ("MemoryError", "OutOfMemoryError"):
        return f"there is too little memory: {error}"
    if isinstance(error, RuntimeError):
        raise error
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error}: pip install -r requirements.txt {error.name.partition('.')[0]}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    # An option as it was typed: ``Options`` call it top_p.
    option = re.compile(r"^[a-z_]+(?=: expected| \[)")
    return option.sub(lambda it: f"--{it[0].replace('_', '-')}", str(error))
