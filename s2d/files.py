"""Writing files so that nothing is ever half there, and nothing is replaced that is not ours."""

import fcntl
import hashlib
import os
import secrets
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

# In every folder written here: what kind of folder it is, then the files and their checksums.
MANIFEST = ".written-by-s2d"


def check_free(path, kind="model", ours=None, replace=False, read=()):
    """Raise ValueError unless ``path`` may be written. Ask before hours of work, not after.

    What is read is never what is written: ``path`` holds nothing of what is ``read``. Nothing may
    be there but an empty folder or, if the user wants to ``replace`` it, what is wholly ours: of
    folders one of this ``kind`` with exactly the files of its manifest, of files what ``ours`` says
    yes to.
    """
    path, how = Path(path), "name another or remove it first"
    for source in filter(None, read):
        if f"{os.path.realpath(source)}/".startswith(f"{os.path.realpath(path)}/"):
            raise ValueError(f"{path} would replace {source}, which is read; name another")
    kept = former_of(path).exists() and not path.exists()  # see staged_folder
    there = former_of(path) if kept else path
    empty = ours is None and there.is_dir() and not any(there.iterdir())
    if not path.is_symlink() and (empty or not there.exists()):
        return
    if path.is_symlink() or not _is_ours(there, ours or partial(_has_manifest, kind=kind)):
        other = f"no {kind} that was written here, or it was changed since"
        raise ValueError(f"{path} is in the way, and {other}; {how}")
    if not replace:
        raise ValueError(f"{path} is there already; {how}, or have it replaced by --replace")


def _is_ours(path, ours):
    try:
        return (path.is_file() or path.is_dir()) and ours(path)  # a device has no end
    except (OSError, ValueError):  # damaged, or of another kind
        return False


def _has_manifest(folder, kind):
    said = (folder / MANIFEST).read_text(encoding="utf-8")
    return said.startswith(f"{kind}\n") and said == _manifest(folder, kind)


def remove_ours(folder, kind):
    if _is_ours(folder, partial(_has_manifest, kind=kind)):
        shutil.rmtree(folder)


def _manifest(folder, kind):
    """The kind, then a line of every file in ``folder``: its SHA-256 and its name."""
    lines = [kind]
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()} {path.name}")
    return "\n".join(lines) + "\n"


def stage_of(folder):
    """The name under which ``folder`` is written until it is complete."""
    return folder.with_name(f".{folder.name}.s2d-partial")


def former_of(folder):
    """The name of the folder that a new ``folder`` replaces, until it is removed."""
    return folder.with_name(f".{folder.name}.s2d-former")


@contextmanager
def staged_folder(folder, kind="model", replace=False):
    """A new folder to fill, which then replaces ``folder`` in one piece, if ``check_free`` allows.

    It keeps the mode. After an error ``folder`` is as it was. After a kill between the two renames
    it is under ``former_of``, from where the next call takes it back. Raises ValueError where
    another process is writing the same folder.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer_of(folder) as stage:
        former = former_of(folder)
        try:
            if former.exists() and not folder.exists():
                os.replace(former, folder)
            check_free(folder, kind, replace=replace)
            shutil.rmtree(former, ignore_errors=True)
            for leftover in stage.iterdir():
                leftover.unlink()
            if folder.exists():
                stage.chmod(folder.stat().st_mode & 0o777 | 0o700)
            with _full_disk_is_an_oserror(folder):
                yield stage
            (stage / MANIFEST).write_text(_manifest(stage, kind), encoding="utf-8")
            for file in stage.iterdir():  # some libraries write files only their owner can read
                file.chmod(stage.stat().st_mode & 0o666)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        if folder.exists():
            os.replace(folder, former)
        os.replace(stage, folder)
        shutil.rmtree(former, ignore_errors=True)


@contextmanager
def _only_writer_of(folder):
    """Its stage, with a lock, which the system takes back from a process that was killed."""
    stage = stage_of(folder)
    stage.mkdir(exist_ok=True)
    lock = os.open(stage, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A writer that has just ended has moved its stage: then it is not the one locked here.
            held = os.path.samestat(os.fstat(lock), stage.stat())
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:
            raise ValueError(f"{folder} is being written by another process; wait for it to end")
        yield stage
    finally:
        os.close(lock)


@contextmanager
def _full_disk_is_an_oserror(path):
    """safetensors has an error of its own for what every other writer calls an OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None


@contextmanager
def staged_file(path):
    """A name to write a file under, which then replaces ``path``, with the mode that this has."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.with_name(f".{path.name}.{secrets.token_hex(4)}.s2d-partial")
    stage.touch(exist_ok=False)
    mode = (path if path.exists() else stage).stat().st_mode & 0o777
    stage.chmod(0o600)  # until the end
    try:
        with _full_disk_is_an_oserror(path):
            yield stage
        stage.chmod(mode)
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


def whole_lines(path):
    """The lines of a file that is only appended to, as one text, without one that was cut short."""
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1]


def drop_half_line(path):
    """Cut ``path`` down to its ``whole_lines``, so that more can be appended."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_text(file):
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8") from None
    if not text.strip():
        raise ValueError(f"{file} holds no text")
    return text
