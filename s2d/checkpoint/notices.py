"""Notices on stderr, and how far a long run is."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

PROGRESS_SECONDS = 10  # between two notices of a long run
# What a terminal would obey, all but line breaks and tabs -> how it is shown.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def tell(message: Any) -> None:
    """A notice, one line on stderr."""
    line = " ".join(str(message).split()).translate(CONTROLS)
    print(line, file=sys.stderr, flush=True)


def progress(items: Iterable, what: str, total: int | None = None) -> Iterator:
    """Yield ``items``. Every ten seconds, a notice says how far this is."""
    told = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            tell(f"{what}: {done}" + (f" of {total}" if total else ""))
        yield item
