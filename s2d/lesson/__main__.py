"""Run the cells of the lesson, and write them with what they show to another notebook."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ..files import staged_file
from . import notebook


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m s2d.lesson", description=__doc__)
    parser.add_argument("--out", required=True, metavar="FILE", help="the notebook to write")
    out = parser.parse_args(arguments).out
    if find_spec("matplotlib") is None:
        parser.error("the pictures need matplotlib: pip install -r tests/requirements.txt")
    try:
        with staged_file(out) as stage:
            book = notebook.read(notebook.LESSON)
            notebook.run(book, folder=notebook.LESSON.parent)
            notebook.write(stage, book)
    except OSError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
