"""What is written is whole or not there, and what exists is not replaced."""

import os
import resource

import pytest
import torch
from helpers import raises_line
from safetensors.torch import save_file

from s2d.checkpoint.files import refuse_existing, staged


def test_a_folder_appears_whole_and_is_never_replaced(tmp_path):
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "new/m") as stage:
        stage.mkdir()
        (stage / "part").write_text("x")
        raise ZeroDivisionError("stopped")
    assert os.listdir(tmp_path / "new") == []
    with staged(tmp_path / "new/m") as stage:
        stage.mkdir()
        save_file({"a": torch.ones(2)}, stage / "w.safetensors")
        assert not (tmp_path / "new/m").exists()
    assert os.listdir(tmp_path / "new") == ["m"]
    (tmp_path / "plain").touch()
    for taken in ("new/m", "plain"):
        message = "is there already; remove it or name another"
        raises_line(refuse_existing, ValueError, message, tmp_path / taken)
    raises_line(refuse_existing, OSError, "is no folder that can be", tmp_path / "plain/a/b")


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
        before = place.lstat()
        message = "is no regular file, and is not replaced"
        with pytest.raises(ValueError, match=message), staged(place) as stage:
            stage.write_text("x")
        assert place.lstat() == before


def test_what_is_written_has_the_permissions_of_a_new_file(tmp_path):
    """And not those that safetensors gives."""
    with staged(tmp_path / "m") as stage:
        stage.mkdir()
        save_file({"a": torch.ones(2)}, stage / "w.safetensors")
    with staged(tmp_path / "w.safetensors") as stage:
        save_file({"a": torch.ones(2)}, stage)
    (tmp_path / "new").touch()
    (tmp_path / "folder").mkdir()
    for file in ("m/w.safetensors", "w.safetensors"):
        assert (tmp_path / file).stat().st_mode == (tmp_path / "new").stat().st_mode
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "folder").stat().st_mode


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
    assert "\n" not in str(caught.value) and os.listdir(tmp_path) == []
