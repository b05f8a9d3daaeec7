"""Files: JSON that is checked, and output that is whole or not there.

What is written goes to a temporary sibling, which is then renamed to the name asked for.
"""

import json
import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path


def read_json(path, missing=None):
    """The object in the file ``path``, or ``missing`` where there is no file and that is given."""
    if not path.is_file():
        if missing is not None:
            return missing
        raise FileNotFoundError(f"{path} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no JSON object")
    return raw


def refuse_existing(path):
    """Raise ValueError where something is at ``path``. Programs ask this before a long run."""
    if Path(path).exists():
        raise ValueError(f"{path} is there already; remove it or name another")


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
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
