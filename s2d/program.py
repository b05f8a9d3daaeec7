"""What the command lines share."""

import argparse
import sys


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before them."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def run_program(name, function, *arguments):
    """Exit code of ``function(*arguments)``: its own, or 0. A user's mistake is one line on stderr and exit code 2."""
    try:
        return function(*arguments) or 0
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
