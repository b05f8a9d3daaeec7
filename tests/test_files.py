"""What is written is whole or not there, and what exists is not replaced."""

import os
import re
import resource
from contextlib import ExitStack

import pytest
import torch
from helpers import raises_line
from safetensors.torch import save_file

from s2d.checkpoint.files import staged, taken


def test_a_folder_appears_whole_and_is_never_replaced(tmp_path):
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "new/m") as stage:
        stage.mkdir()
        (stage / "part").write_text("x")
        raise ZeroDivisionError("stopped")
    assert os.listdir(tmp_path / "new") == []
    with staged(tmp_path / "new/m") as stage:
        stage.mkdir()
        (stage / "part").write_text("x")
        assert not (tmp_path / "new/m").exists()
    assert os.listdir(tmp_path / "new") == ["m"]
    (tmp_path / "plain").touch()
    begin = ExitStack().enter_context
    for there in ("new/m", "plain"):
        message = "is there already; remove it or name another"
        raises_line(begin, ValueError, message, taken(tmp_path / there))
    raises_line(begin, OSError, "cannot be written: Not a dir", taken(tmp_path / "plain/a/b"))


def test_the_files_of_safetensors_have_the_permissions_of_any_new_file(tmp_path):
    with staged(tmp_path / "m") as folder:
        folder.mkdir()
        save_file({"a": torch.ones(2)}, folder / "w")
    with staged(tmp_path / "w") as file:
        save_file({"a": torch.ones(2)}, file)
    (tmp_path / "plain").touch()
    assert len({(tmp_path / name).stat().st_mode for name in ("m/w", "w", "plain")}) == 1


def test_a_file_is_replaced_in_one_piece(tmp_path):
    """Each writer has a stage of its own; after an error what was there is still there."""
    with staged(tmp_path / "f") as one:
        one.write_text("1")
        with staged(tmp_path / "f") as two:
            two.write_text("2")
        assert (tmp_path / "f").read_text() == "2"
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "f") as stage:
        stage.write_text("3")
        raise ZeroDivisionError("stopped")
    assert (tmp_path / "f").read_text() == "1" and os.listdir(tmp_path) == ["f"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    """As a device: whoever writes to /dev/null as root would remove it."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for place in tmp_path.iterdir():
        before = place.lstat().st_ino, place.lstat().st_mode
        message = "is no regular file, and is not replaced"
        with pytest.raises(ValueError, match=message), staged(place) as stage:
            stage.write_text("x")
        assert (place.lstat().st_ino, place.lstat().st_mode) == before


WRITERS = [
    lambda path: torch.save(torch.ones(9999), path),
    lambda path: save_file({"a": torch.ones(9999)}, path),
    lambda path: path.write_text("x" * 9999),
]


@pytest.mark.parametrize("write", WRITERS, ids=["pytorch", "safetensors", "text"])
def test_a_disk_that_takes_no_more_is_one_line(tmp_path, write):
    """Here by the limit of a file's size (EFBIG), where nothing is left of the file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(OSError) as caught, staged(tmp_path / "f") as stage:
            write(stage)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.fullmatch(r".*/f cannot be written: .+", str(caught.value))
    assert os.listdir(tmp_path) == []
