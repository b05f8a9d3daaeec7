"""What breaks losslessness, and by how much: ``python -m s2d.proof``."""

import sys

from ..cli.ending import run_program


def show() -> None:
    """Print how far right and wrong rules are from the target's law."""
    from .lossless import print_table

    print_table()


if __name__ == "__main__":
    sys.exit(run_program("python -m s2d.proof", show))
