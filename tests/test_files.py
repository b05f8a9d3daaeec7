"""What is written is whole or not there, and what exists is not replaced."""

import errno
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import raises_line, run_and_kill
from safetensors.torch import save_file

from s2d.checkpoint.names import names_of
from s2d.files import claimed, refuse_existing, refuse_other_than_file, staged_file, staged_folder


def test_a_folder_appears_whole_and_is_never_replaced(tmp_path):
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "new/m") as stage:
        (stage / "part").write_text("x")
        raise RuntimeError("stopped")
    assert os.listdir(tmp_path / "new") == []
    with staged_folder(tmp_path / "new/m") as stage:
        save_file({"a": torch.ones(2)}, stage / "w.safetensors")
        assert not (tmp_path / "new/m").exists()
    assert os.listdir(tmp_path / "new") == ["m"]
    (tmp_path / "plain").touch()
    for taken in ("new/m", "plain"):
        message = "is there already; remove it or name another"
        raises_line(staged_folder(tmp_path / taken).__enter__, ValueError, message)


def test_a_file_is_replaced_in_one_piece(tmp_path):
    """Each writer has a stage of its own; after an error what was there is still there."""
    with staged_file(tmp_path / "f") as one:
        one.write_text("1")
        with staged_file(tmp_path / "f") as two:
            two.write_text("2")
        assert (tmp_path / "f").read_text() == "2"
    with pytest.raises(RuntimeError), staged_file(tmp_path / "f") as stage:
        stage.write_text("3")
        raise RuntimeError("stopped")
    assert (tmp_path / "f").read_text() == "1" and os.listdir(tmp_path) == ["f"]


def test_what_is_no_file_is_refused_and_a_links_target_is_written(tmp_path):
    """As root, a rename would put a file in the place of /dev/null for everybody."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for taken in (tmp_path, fifo, Path("/dev/null")):
        raises_line(staged_file(taken).__enter__, ValueError, "is no regular file")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for text in ("1", "2"):
        with staged_file(tmp_path / "link") as stage:
            stage.write_text(text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == text


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    """A name under a file or in a circle of links; a link to a folder that is yet to be made."""
    (tmp_path / "plain").touch()
    for refuse in (refuse_existing, refuse_other_than_file):
        for name in ("plain/f", "plain/new/f"):
            message = "plain is no folder that can be written to"
            raises_line(refuse, ValueError, message, tmp_path / name)
        refuse(tmp_path / "new/folder/f")
    (tmp_path / "circle").symlink_to("circle")
    raises_line(refuse_other_than_file, ValueError, "no regular file", tmp_path / "circle")
    raises_line(refuse_existing, ValueError, "is there already", tmp_path / "circle")
    (tmp_path / "link").symlink_to("target")
    with staged_folder(tmp_path / "link") as stage:
        (stage / "f").touch()
    assert (tmp_path / "link").is_symlink() and os.listdir(tmp_path / "target") == ["f"]


def test_every_name_of_a_folder_is_known(tmp_path, monkeypatch):
    """Of a link to a link, the one between as well; a circle of links has an end."""
    for name in ("real/folder", "between", "own"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "between/mini").symlink_to("../real/folder")
    (tmp_path / "own/link").symlink_to(tmp_path / "between/mini")
    chain = [tmp_path / name for name in ("own/link", "between/mini", "real/folder")]
    assert names_of(tmp_path / "own/link") == chain
    monkeypatch.chdir(tmp_path / "own")
    assert names_of("link") == chain
    (tmp_path / "circle").symlink_to("circle")
    assert names_of(tmp_path / "circle") == [tmp_path / "circle"]


@pytest.mark.parametrize("lack", ["fcntl", "locks"])
def test_where_there_are_no_locks_that_is_said_and_work_goes_on(
    tmp_path, monkeypatch, capsys, lack
):
    """As on Windows, which has no fcntl, and on some file systems of networks."""
    if lack == "fcntl":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:

        def refuse(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
    with claimed(tmp_path / "out"):
        (tmp_path / "out").touch()
    assert os.listdir(tmp_path) == ["out"]
    assert capsys.readouterr().err.count("there are no locks here") == 1


def test_a_lock_that_was_removed_before_it_was_taken_is_none(tmp_path, monkeypatch):
    """The program that had it has just ended, and another one may have made a new one."""
    lock = tmp_path / ".out.lock"
    for then in (lambda: None, lock.touch):

        def ends(*_):
            lock.unlink()
            then()  # noqa: B023

        monkeypatch.setattr("fcntl.flock", ends)
        with pytest.raises(ValueError, match="another program is writing"):
            with claimed(tmp_path / "out"):
                pass


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_umask_is_kept(tmp_path, mask):
    before = os.umask(mask)
    try:
        with staged_folder(tmp_path / "m") as stage:
            save_file({"a": torch.ones(2)}, stage / "w.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "m/w.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o777 & ~mask


def write_slowly(folder):
    with staged_folder(folder) as stage:
        for number in range(20):
            (stage / f"{number}").touch()
            time.sleep(0.01)


def test_a_kill_leaves_nothing_under_the_name(tmp_path):
    for seconds in (0.05, 0.1, 0.15):
        run_and_kill(seconds, write_slowly, tmp_path / "m")
        assert not (tmp_path / "m").exists()
    run_and_kill(60, write_slowly, tmp_path / "m")
    assert len(os.listdir(tmp_path / "m")) == 20
