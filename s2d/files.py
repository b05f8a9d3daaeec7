"""Writing files and folders: a temporary sibling is filled, then renamed to the name asked for.

So what is written is whole or not there, whenever a program is stopped.
"""

import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path


def refuse_existing(path, advice="remove it or name another"):
    """Raise ValueError where something is at ``path``. Programs ask this before a long run."""
    if Path(path).exists():
        raise ValueError(f"{path} is there already; {advice}")


@contextmanager
def staged_folder(path):
    """A new folder to fill, which is then renamed to ``path``; ValueError if that exists."""
    path = Path(path)
    refuse_existing(path)
    with temporary_sibling(path) as stage:
        yield stage
        for file in stage.iterdir():  # safetensors lets only the owner read its files
            file.chmod(stage.stat().st_mode & 0o666)
        os.rename(stage, path)


@contextmanager
def staged_file(path):
    """The name of a file to write, which is then renamed to ``path``; one there is replaced."""
    path = Path(path)
    with temporary_sibling(path) as folder:
        stage = folder / path.name
        yield stage
        stage.chmod(folder.stat().st_mode & 0o666)
        os.replace(stage, path)


@contextmanager
def temporary_sibling(path):
    """An empty folder beside ``path``; what is left of it is removed, but not after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_text(file):
    """The text in ``file``; ValueError where it is not UTF-8, or empty."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8") from None
    if not text.strip():
        raise ValueError(f"{file} holds no text")
    return text
