"""Run the cells of the lesson, and write them with what they show to another notebook."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ..cli.program import Parser, run_program
from ..files import staged_file
from . import notebook


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program("lesson", run_lesson, arguments)


def run_lesson(arguments: Sequence[str] | None) -> None:
    parser = Parser("python -m s2d.lesson", description=__doc__)
    parser.add_argument("--out", required=True, metavar="FILE", help="the notebook to write")
    out = parser.parse_args(arguments).out
    if find_spec("matplotlib") is None:
        raise ValueError("the pictures need matplotlib: pip install -r tests/requirements.txt")
    with staged_file(out) as stage:
        book = notebook.read(notebook.LESSON)
        notebook.run(book, folder=notebook.LESSON.parent)
        notebook.write(stage, book)


if __name__ == "__main__":
    sys.exit(main())
