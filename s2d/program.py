"""What the command lines share: a user's mistake is one line, notices go to stderr."""

import argparse
import os
import sys

from .tree import Dynamic


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without the usage before it
        self.exit(2, f"{self.prog}: {message}\n")


def comma_separated(kind):
    def comma_separated_list(text):  # argparse names it in its error
        return tuple(kind(part) for part in text.split(","))

    return comma_separated_list


def parse_tree(text):
    """4,2,2,1 -> (4, 2, 2, 1), and 6x4x60 -> Dynamic(top_k=6, depth=4, size=60)."""
    if "x" in text:
        top_k, depth, size = map(int, text.split("x"))
        return Dynamic(top_k, depth, size)
    return tuple(map(int, text.split(",")))


def read_stop(text, draft=None):
    """What a command line gives as ``stop``: a probability, or the file of a decision model."""
    try:
        return float(text)
    except ValueError:
        from .extras.decision import PathStop, load_decision

        return PathStop(load_decision(text, draft))


def tell(message):
    """A notice, one line on stderr."""
    print(" ".join(str(message).split()), file=sys.stderr)


def run_program(name, function, *arguments):
    """Exit code of ``function(*arguments)``; a user's mistake is one line on stderr, and 2."""
    try:
        code = function(*arguments) or 0
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain at its exit
        return 141
    except (ValueError, OSError, ModuleNotFoundError) as error:
        tell(f"{name}: {error}")
        return 2
