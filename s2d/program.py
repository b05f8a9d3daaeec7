"""What the command lines share."""

import sys


def run_program(name, function, *arguments):
    """Exit code of ``function(*arguments)``: its own, or 0. A user's mistake is one line on stderr and exit code 2."""
    try:
        return function(*arguments) or 0
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
