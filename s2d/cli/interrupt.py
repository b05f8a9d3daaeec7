"""Ctrl-C while a program imports what it needs, which takes a second or two."""

import sys
from types import TracebackType


def say_interrupted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """As ``sys.excepthook``: one word about Ctrl-C, and a traceback of all else."""
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
