"""Files: text and JSON that are checked, and output that is whole or not there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .notices import tell

# How safetensors and PyTorch say that a file cannot be written.
DISK = "No space left on device", "PytorchStreamWriter failed", "iostream error", "unexpected pos"


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error})") from None


def read_parts(path: Path | str) -> str:
    """The text of a file in UTF-8 of many parts, such as lines, of which some may be spoilt.

    What is not UTF-8 becomes surrogates, which a tokenizer refuses: so no other part is spoilt.
    Raises ValueError for UTF-16, in which all are spoilt.
    """
    text = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    if text.startswith(("\udcff\udcfe", "\udcfe\udcff")) and "\0" in text:
        raise ValueError(f"{path} is not in UTF-8 (it is UTF-16)")
    return text


def read_json(path: Path, missing: Any = None) -> Any:
    """The object in the file ``path``, or ``missing`` if there is no file and that is given."""
    if missing is not None and not path.is_file():
        return missing
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} holds no JSON object ({error})") from None


def refuse_other_than_utf8(path: Path | str) -> None:
    """Raise ValueError if a name is not in UTF-8: safetensors and PyTorch open no such file."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the path {path} is not in UTF-8; rename it") from None


def find_place(path: Path | str) -> Path:
    """Where an output called ``path`` is written: of a link, its target.

    Raises ValueError if the folder of that is none, and cannot be made.
    """
    place = Path(os.path.realpath(path))
    folder = next((each for each in place.parents if each.exists()), place)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"{path}: {folder} is no folder that can be written to")
    return place


def refuse_existing(path: Path | str) -> Path:
    """The place of an output that is not there yet. Programs ask for it before a long run.

    Raises ValueError if something is there, or nothing can be.
    """
    place = find_place(path)
    if os.path.lexists(place):
        raise ValueError(f"{path} is there already; remove it or name another")
    return place


def refuse_other_than_file(path: Path | str) -> Path:
    """As ``refuse_existing``, but a file may be there, to be replaced."""
    place = find_place(path)
    if os.path.lexists(place) and not place.is_file():
        raise ValueError(f"{path} is there already and is no regular file; name another")
    return place


@contextmanager
def staged_file(path: Path | str) -> Iterator[Path]:
    """The name of a file to write, which is then renamed to ``path``; a file there is replaced.

    Of a link the target is written.
    """
    with staged(refuse_other_than_file(path)) as stage:
        yield stage


@contextmanager
def staged_folder(path: Path | str) -> Iterator[Path]:
    """A new folder to fill, which is then renamed to ``path``; ValueError if that exists."""
    with staged(refuse_existing(path)) as stage:
        stage.mkdir()
        yield stage


@contextmanager
def claimed(path: Path | str) -> Iterator[None]:
    """Keep other programs that claim ``path`` from writing it meanwhile.

    The claim is a lock on a file next to it, which is removed at the end. The operating system ends
    the lock with the program, however that ends: a file that is left does not matter. Raises
    ValueError if another program has the claim.
    """
    place = find_place(path)
    made = [folder for folder in place.parents if not folder.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.with_name(f".{place.name}.lock")
    with lock.open("w") as file:
        try:
            import fcntl  # only Unix has it

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                raise BlockingIOError  # this one was removed, and there is another one
        except (BlockingIOError, FileNotFoundError):
            raise ValueError(
                f"another program is writing {path}; wait for its end, or name another"
            ) from None
        except (ImportError, OSError) as error:  # some file systems have no locks
            tell(f"let no other program write {path}: there are no locks here ({error})")
        try:
            yield
        finally:
            with suppress(PermissionError):  # Windows removes no open file
                lock.unlink(missing_ok=True)  # before the lock ends, or it might be another's
            with suppress(OSError):  # one that is not empty stays
                for folder in made:
                    folder.rmdir()


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        stage = Path(folder, path.name)
        yield stage
        for file in (stage, *stage.rglob("*")):
            if file.is_file():  # safetensors lets only the owner read its files
                file.chmod(0o666 & ~read_umask())
        stage.replace(path)


def read_umask() -> int:
    """The permissions that new files are not to have; there is no way to ask but to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def lack_of_room(error: Exception) -> str:
    """One line about memory or a disk that is full; "" for any other error.

    PyTorch and safetensors have no class of their own for these, but for a GPU's memory.
    """
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or "out of memory" in first or "allocate memory" in first:
        return f"there is not enough memory ({first or 'MemoryError'})"
    if any(words in str(error) for words in DISK):
        return f"the disk is full, or cannot be written to ({first})"
    return ""
