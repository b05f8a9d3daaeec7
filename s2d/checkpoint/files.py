"""Files: text and JSON that are checked, and output that is whole or not there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark."""
    return Path(path).read_text(encoding="utf-8-sig")


def read_json(path: Path, missing: Any = None) -> Any:
    """The object in the file ``path``, or ``missing`` if there is no file and that is given."""
    if missing is not None and not path.is_file():
        return missing
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no JSON object ({error})") from None


def refuse_existing(path: Path | str) -> Path:
    """``path``, an output that is not there yet. Programs ask for it before a long run."""
    if os.path.lexists(path):
        raise ValueError(f"{path} is there already; remove it or name another")
    return Path(path)


@contextmanager
def staged(path: Path | str) -> Iterator[Path]:
    """The name of a file, or of a folder to make, which is then renamed to ``path``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder, path.name)
        os.replace(Path(folder, path.name), path)
