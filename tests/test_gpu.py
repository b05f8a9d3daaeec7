"""tests/gpu.py: whatever happens to one part, what it found is kept, and the others run."""

import sys

import gpu


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path):
    row = "import os, time; print('| ar | 3.14 |', flush=True); "
    commands = {
        "raises": (row + "raise ValueError('what went wrong')", 60),
        "hangs": (row + "time.sleep(60)", 1),
        "works": (row, 60),
    }
    commands = {name: ([sys.executable, "-c", code], s) for name, (code, s) in commands.items()}
    assert gpu.run_parts(commands, tmp_path) == 1
    text = (tmp_path / "gpu.md").read_text()
    for name, ended in (
        ("raises", "failed with exit code 1, see gpu.log"),
        ("hangs", "cut off after 1 s"),
        ("works", "ok"),
    ):
        assert f"### {name}\n\n| ar | 3.14 |\n\n{name}: {ended}\n" in text
    assert "ValueError: what went wrong" in (tmp_path / "gpu.log").read_text()
