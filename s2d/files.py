"""Writing files so that nothing is ever half there, and nothing is replaced that is not ours."""

import fcntl
import hashlib
import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

# In every folder written here: what kind of folder it is, then the files and their checksums.
MANIFEST = ".written-by-s2d"


def check_free(folder, kind="model"):
    """Raise ValueError unless ``folder`` may be written: there is none, or it is empty, or ours.

    Ours is a folder of the same kind that holds exactly the files of its manifest. Ask before
    hours of work, not after.
    """
    folder, how = Path(folder), "name another folder or remove it first"
    if folder.is_symlink() or folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is in the way, and no folder; {how}")
    if folder.exists() and any(folder.iterdir()) and not _is_ours(folder, kind):
        what = "is not empty and holds what was not written here, or was changed since"
        raise ValueError(f"{folder} {what}; {how}")
    folder.parent.mkdir(parents=True, exist_ok=True)


def _is_ours(folder, kind):
    """Whether there is a manifest, of this ``kind``, and it is true."""
    try:
        said = (folder / MANIFEST).read_text(encoding="utf-8")
        return said.startswith(f"{kind}\n") and said == _manifest(folder, kind)
    except (OSError, ValueError):
        return False


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
def staged_folder(folder, kind="model"):
    """A new folder to fill, which then replaces ``folder`` in one piece, if ``check_free`` allows.

    After an error ``folder`` is as it was. After a kill between the two renames it is under
    ``former_of``, from where the next call takes it back. Raises ValueError where another process
    is writing the same folder.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer_of(folder):
        stage, former = stage_of(folder), former_of(folder)
        if former.exists() and not folder.exists():
            os.replace(former, folder)
        check_free(folder, kind)
        for leftover in (stage, former):
            shutil.rmtree(leftover, ignore_errors=True)
        stage.mkdir()
        try:
            with _full_disk_is_an_oserror(folder):
                yield stage
            for file in stage.iterdir():  # some libraries write files only their owner can read
                file.chmod(stage.stat().st_mode & 0o666)
            (stage / MANIFEST).write_text(_manifest(stage, kind), encoding="utf-8")
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        if folder.exists():
            os.replace(folder, former)
        os.replace(stage, folder)
        shutil.rmtree(former, ignore_errors=True)


@contextmanager
def _only_writer_of(folder):
    """Hold a lock, which the system takes back from a process that was killed."""
    path = folder.with_name(f".{folder.name}.s2d-lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A writer that has just ended removed its lock: then the one held here is no longer it.
            held = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:
            raise ValueError(f"{folder} is being written by another process; wait for it to end")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _full_disk_is_an_oserror(path):
    """safetensors has an error of its own for what every other writer calls an OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None


@contextmanager
def staged_file(path):
    """A name to write a file under, which then replaces ``path``. Every writer has its own."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.with_name(f".{path.name}.{secrets.token_hex(4)}.s2d-partial")
    stage.touch(exist_ok=False)
    mode = stage.stat().st_mode & 0o666
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
    whole = whole_lines(path)
    if path.stat().st_size != len(whole.encode("utf-8")):
        with staged_file(path) as stage:
            stage.write_text(whole, encoding="utf-8")
