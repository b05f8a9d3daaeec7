"""Run the cells of a notebook without Jupyter, and store what they show as Jupyter would."""

import ast
import base64
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LESSON = Path(__file__).parent / "lesson.ipynb"


def read(file: Path) -> dict[str, Any]:
    """The notebook in ``file``, in nbformat 4 (nbformat.readthedocs.io)."""
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, book: dict[str, Any]) -> None:
    """Write ``book`` to ``file``, in lines as Jupyter writes them."""
    file.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def code_cells(book: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (cell for cell in book["cells"] if cell["cell_type"] == "code")


def run(book: dict[str, Any], folder: Path) -> None:
    """Run the code cells of ``book`` in order, in ``folder``, and replace their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for count, cell in enumerate(code_cells(book), start=1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = run_code("".join(cell["source"]), names)
            cell["execution_count"] = count
            cell["outputs"] = []
            if printed.getvalue():
                lines = printed.getvalue().splitlines(keepends=True)
                stream = {"name": "stdout", "output_type": "stream", "text": lines}
                cell["outputs"].append(stream)
            if value is not None:
                cell["outputs"].append(
                    {
                        "data": shown(value),
                        "execution_count": count,
                        "metadata": {},
                        "output_type": "execute_result",
                    }
                )


def run_code(source: str, names: dict[str, Any]) -> Any:
    """Run ``source`` with these global ``names``; the value of its last line, if it has one."""
    module = ast.parse(source)
    last = None
    if module.body and isinstance(module.body[-1], ast.Expr):
        last = ast.Expression(module.body.pop().value)
    exec(compile(module, "a cell", "exec"), names)
    return None if last is None else eval(compile(last, "a cell", "eval"), names)


def shown(value: Any) -> dict[str, Any]:
    """What Jupyter stores of a value: its text, and a picture if it has one."""
    data: dict[str, Any] = {}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    data["text/plain"] = [repr(value)]
    return data
