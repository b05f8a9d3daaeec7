"""Files: JSON that is checked, and output that is whole or not there."""

import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def read_json(path, missing=None):
    """The object in the file ``path``, or ``missing`` where there is no file and that is given."""
    if missing is not None and not path.is_file():
        return missing
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no JSON object ({error})") from None


def refuse_existing(path):
    """Raise ValueError where something is at ``path``. Programs ask this before a long run."""
    if Path(path).exists():
        raise ValueError(f"{path} is there already; remove it or name another")


@contextmanager
def staged_file(path):
    """The name of a file to write, which is then renamed to ``path``; one there is replaced."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        stage = Path(folder, path.name)
        yield stage
        for file in (stage, *stage.rglob("*")):  # safetensors lets only the owner read its files
            file.chmod(file.stat().st_mode | 0o044)
        stage.replace(path)


@contextmanager
def staged_folder(path):
    """A new folder to fill, which is then renamed to ``path``; ValueError if that exists."""
    refuse_existing(path)
    with staged_file(path) as stage:
        stage.mkdir()
        yield stage
