"""What is written is whole or not there, and what exists is not replaced."""

import os
import time

import pytest
import torch
from helpers import raises_line, run_and_kill
from safetensors.torch import save_file

from s2d.checkpoint.files import refuse_existing, staged


def test_a_folder_appears_whole_and_is_never_replaced(tmp_path):
    with pytest.raises(RuntimeError), staged(tmp_path / "new/m") as stage:
        stage.mkdir()
        (stage / "part").write_text("x")
        raise RuntimeError("stopped")
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


def test_a_file_is_replaced_in_one_piece(tmp_path):
    """Each writer has a stage of its own; after an error what was there is still there."""
    with staged(tmp_path / "f") as one:
        one.write_text("1")
        with staged(tmp_path / "f") as two:
            two.write_text("2")
        assert (tmp_path / "f").read_text() == "2"
    with pytest.raises(RuntimeError), staged(tmp_path / "f") as stage:
        stage.write_text("3")
        raise RuntimeError("stopped")
    assert (tmp_path / "f").read_text() == "1" and os.listdir(tmp_path) == ["f"]


def write_slowly(folder):
    with staged(folder) as stage:
        stage.mkdir()
        for number in range(20):
            (stage / f"{number}").touch()
            time.sleep(0.01)


def test_a_kill_leaves_nothing_under_the_name(tmp_path):
    for seconds in (0.05, 0.1, 0.15):
        run_and_kill(seconds, write_slowly, tmp_path / "m")
        assert not (tmp_path / "m").exists()
    run_and_kill(60, write_slowly, tmp_path / "m")
    assert len(os.listdir(tmp_path / "m")) == 20
