"""Files: text and JSON that are checked, and output that is whole or not there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: see its byte {error.start}") from None
    except OSError as error:
        error.filename = str(path)  # which a read that fails does not say
        raise


def read_json(path: Path, missing: Any = None) -> Any:
    """The object in the file ``path``, or ``missing`` if there is no file and that is given."""
    if missing is not None and not path.is_file():
        return missing
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no JSON object ({error})") from None


def read_safetensors(path: Path | str, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file; ValueError if it is none, and so no ``what``."""
    try:
        Path(path).open("rb").close()  # or safetensors says that what may not be read is not there
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"no {what} at {path}: {error}") from None


@contextmanager
def taken(path: Path | str) -> Iterator[Path]:
    """Hold ``path``, an output that is not there yet, for a program that writes it at its end.

    Its folder is made, and a hidden file beside it is locked until the program is done or killed.
    Of torchrun's processes the first one does so. Raises ValueError if the output is there already
    or another program holds it, and OSError if it cannot be written.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise ValueError(f"{path} is there already; remove it or name another")
    if os.environ.get("RANK", "0") != "0":
        yield path
        return
    # This name is longer than that of any file that is written beside an output.
    lock = path.with_name(f".{path.name}.is-being-written")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        try:
            from fcntl import LOCK_EX, LOCK_NB, flock

            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is being written by another program") from None
        except (OSError, ImportError):
            pass  # Windows has no such locks, nor have some file systems of clusters
        try:
            yield path
        finally:
            with suppress(OSError):  # Windows keeps a file that is open
                lock.unlink()


@contextmanager
def staged(path: Path | str) -> Iterator[Path]:
    """The name of a file, or of a folder to make, which is then renamed to ``path``.

    A file there is replaced. Raises OSError if the disk is full, or ValueError if what is there is
    no file.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_file():  # a folder, or a device such as /dev/null
        raise ValueError(f"{path} is no regular file, and is not replaced; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".new.", dir=path.parent) as folder:
        stage = Path(folder, path.name)
        try:
            yield stage
        except (SafetensorError, RuntimeError, OSError) as error:  # how a full disk is said
            if getattr(error, "filename", None) is not None:
                raise
            first = str(error).partition("\n")[0]
            raise OSError(f"{path} cannot be written: {first}") from None
        # safetensors lets only the owner read its files. These get what a new file has.
        plain = Path(folder, ".plain")
        plain.touch()
        mode = plain.stat().st_mode
        for file in (stage, *stage.rglob("*")):
            if file.is_file():
                file.chmod(mode)
        os.replace(stage, path)
