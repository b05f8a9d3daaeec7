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
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error})") from None


def read_json(path: Path, missing: Any = None) -> Any:
    """The object in the file ``path``, or ``missing`` if there is no file and that is given."""
    if missing is not None and not path.is_file():
        return missing
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no JSON object ({error})") from None


def refuse_existing(path: Path | str) -> None:
    """Raise ValueError if something is at ``path``. Programs ask this before a long run."""
    if Path(path).exists():
        raise ValueError(f"{path} is there already; remove it or name another")


def refuse_other_than_file(path: Path | str) -> None:
    """Raise ValueError if ``path`` is there and no file that can be replaced by another."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is there already and is no regular file; name another")


@contextmanager
def staged_file(path: Path | str) -> Iterator[Path]:
    """The name of a file to write, which is then renamed to ``path``; a file there is replaced.

    Of a link the target is written.
    """
    path = Path(path).resolve()
    refuse_other_than_file(path)
    with staged(path) as stage:
        yield stage


@contextmanager
def staged_folder(path: Path | str) -> Iterator[Path]:
    """A new folder to fill, which is then renamed to ``path``; ValueError if that exists."""
    refuse_existing(path)
    with staged(Path(path)) as stage:
        stage.mkdir()
        yield stage


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        stage = Path(folder, path.name)
        yield stage
        for file in (stage, *stage.rglob("*")):
            if file.is_file():  # safetensors lets only the owner read its files
                file.chmod(0o666 & ~umask())
        stage.replace(path)


def umask() -> int:
    """The permissions that new files are not to have; there is no way to ask but to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
