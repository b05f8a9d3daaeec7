"""How a program ends: with an exit code and, if it did not do its work, one line that says why."""

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress

from ..checkpoint.notices import tell
from .program import Parser


class Stderr(io.FileIO):
    def write(self, data: bytes) -> int:
        with suppress(OSError):  # a notice that nobody can read costs no answer
            super().write(data)
        return len(data)


def run_program(name: str, function: Callable[..., int | None], *arguments: object) -> int:
    """The exit code of ``function(*arguments)``, which imports what it needs itself.

    2: a user's mistake, a missing package, a full disk or too little memory. 130: Ctrl-C. 141: the
    reader of stdout, such as head, has enough. Without ``arguments`` there are no options.
    """
    sys.stdin = sys.stdin or open(os.devnull)  # a stream that the shell closed is None
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if sys.stderr is sys.__stderr__:
        sys.stderr = io.TextIOWrapper(Stderr(2, "w", closefd=False), write_through=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # in an old code page, 日 is \u65e5
    code = 2
    try:
        if not arguments:
            Parser(prog=name, description=function.__doc__).parse_args()
        result = function(*arguments)
        sys.stdout.flush()
        return result or 0
    except KeyboardInterrupt:
        code = 130
        tell("interrupted")
    except BrokenPipeError:
        code = 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        tell(f"{name}: {place}{error.strerror or error}")
    except (ValueError, ModuleNotFoundError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise  # a fault of the program itself
        option = re.compile(r"^[a-z_]+(?=: expected| \[)")  # ``Options`` say top_p for --top-p
        words = option.sub(lambda it: f"--{it[0].replace('_', '-')}", str(error) or repr(error))
        tell(f"{name}: {words}")
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again at its exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
