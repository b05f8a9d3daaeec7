"""Writing so that nothing is ever half there, and nothing is replaced that is not plainly ours."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

MANIFEST = ".written-by-s2d"  # in every folder written here: the files that were, and their sizes


def check_free(folder):
    """Raise ValueError unless ``folder`` may be written: there is none, or it is empty, or plainly ours.

    Ours is a folder that holds just the files that its manifest lists. Ask before hours of work, not after.
    """
    folder = Path(folder)
    if folder.is_dir() and not folder.is_symlink():
        if not any(folder.iterdir()) or _is_ours(folder):
            return
        raise ValueError(
            f"{folder} is not empty and holds what was not written here; name another folder or remove it first"
        )
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} is in the way, and no folder; name another or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)


def _is_ours(folder):
    manifest = folder / MANIFEST
    return manifest.is_file() and manifest.read_text(
        encoding="utf-8", errors="replace"
    ) == _listing(folder)


def _listing(folder):
    """The lines of a manifest: every file and its size."""
    files = sorted(entry for entry in folder.iterdir() if entry.name != MANIFEST)
    return "".join(f"{file.stat().st_size} {file.name}\n" for file in files)


def stage_of(path):
    """The name under which ``path`` is written until it is complete."""
    return path.with_name(f".{path.name}.s2d-partial")


def former_of(folder):
    """The name of the folder that a new ``folder`` takes the place of, until it is gone."""
    return folder.with_name(f".{folder.name}.s2d-former")


@contextmanager
def staged_folder(folder):
    """A new folder to fill, which then takes the place of ``folder`` in one piece, if ``check_free`` allows it.

    After an error ``folder`` is as it was; after a kill between the two renames it is under ``former_of``, from where the
    next call takes it back.
    """
    folder = Path(folder)
    stage, former = stage_of(folder), former_of(folder)
    if former.exists() and not folder.exists():
        os.replace(former, folder)
    check_free(folder)
    for leftover in (stage, former):
        shutil.rmtree(leftover, ignore_errors=True)
    stage.mkdir()
    try:
        yield stage
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    for file in stage.iterdir():  # some libraries write files that only their owner can read
        file.chmod(stage.stat().st_mode & 0o666)
    (stage / MANIFEST).write_text(_listing(stage), encoding="utf-8")
    if folder.exists():
        os.replace(folder, former)
    os.replace(stage, folder)
    shutil.rmtree(former, ignore_errors=True)


@contextmanager
def staged_file(path):
    """A name to write a file under, which then takes the place of ``path``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = stage_of(path)
    stage.unlink(missing_ok=True)  # a leftover, or a link that would lead elsewhere
    stage.write_bytes(b"")
    mode = stage.stat().st_mode & 0o666
    try:
        yield stage
        stage.chmod(mode)
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


def whole_lines(path):
    """The lines of a text file that is only ever appended to, as one text, without a last one that a kill cut short."""
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1]


def drop_half_line(path):
    """Cut ``path`` down to its ``whole_lines``, so that more can be appended."""
    whole = whole_lines(path)
    if path.stat().st_size != len(whole.encode("utf-8")):
        with staged_file(path) as stage:
            stage.write_text(whole, encoding="utf-8")
