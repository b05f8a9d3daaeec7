"""What Ctrl-C does while a program starts. It imports next to nothing: it has to be there first."""

import os
import signal
import sys

RUN = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "run.py")


def is_starting():
    """Whether this is a command line (run.py, python -m s2d.room) that Ctrl-C may end."""
    name = "".join(sys.argv[:1])
    ours = name == "-m" or os.path.realpath(name) == RUN
    return ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def end_at_once(*_):
    """While modules load: in their C code an exception would be lost, or end in an abort."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)
