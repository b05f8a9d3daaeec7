"""The animated picture of README.md: ``python -m s2d.trace > race.svg``."""

import sys

from ..cli.ending import run_program


def draw() -> None:
    """Measure an answer by the target alone and by S2D, and draw both as an SVG on stdout."""
    from ..pair.loading import load_pair
    from .race import draw_race

    print(draw_race(load_pair("13b")), end="")


if __name__ == "__main__":
    sys.exit(run_program("python -m s2d.trace", draw))
