"""``python -m s2d.proof``: what breaks losslessness, and by how much."""

import sys

from ..cli.program import Parser, run_program


def main() -> None:
    """Print the table of lossless.py."""
    Parser(prog="python -m s2d.proof", description=__doc__).parse_args()
    from .lossless import print_table  # after it: --help is quick

    print_table()


if __name__ == "__main__":
    sys.exit(run_program("s2d.proof", main))
