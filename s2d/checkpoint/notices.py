"""Notices on stderr, and how far a long run is."""

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

PROGRESS_SECONDS = 10  # between two notices of a long run
# What a terminal would obey, all but line breaks and tabs -> how it is shown.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def tell(message: Any) -> None:
    """A notice, one line on stderr; one that nobody can read costs no answer."""
    with suppress(OSError):
        line = " ".join(str(message).split()).translate(CONTROLS)
        if sys.stderr.isatty():
            line = textwrap.fill(line, shutil.get_terminal_size().columns)
        print(line, file=sys.stderr, flush=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says so, as Python, PyTorch or safetensors do."""
    words = "allocate memory" in str(error)
    return words or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def progress(items: Iterable, what: str, total: int | None = None) -> Iterator:
    """Yield ``items``; of what takes long, tell every ten seconds how far it is."""
    told = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            tell(f"{what}: {done}" + (f" of {total}" if total else ""))
        yield item
