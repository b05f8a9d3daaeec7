"""tests/gpu.py: whatever happens to one part, what it found is kept, and the others run."""

import json
import sys

import gpu
import gpu_parts
from helpers import refuses


def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path, capsys):
    found = {"method": "ar", "tokens/s": 3.14159}
    row = f"import json, sys, time; print(json.dumps({found}), flush=True); "
    commands = {
        "raises": (row + "raise ValueError('what went wrong')", 60),
        "dies": (row + "import os; os.abort()", 60),
        "hangs": (row + "print('{\"half', end='', flush=True); time.sleep(60)", 2),
        "works": (row, 60),
    }
    commands = {name: ([sys.executable, "-c", code], s) for name, (code, s) in commands.items()}
    assert gpu.run_parts(commands, tmp_path) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["rows"] for part in report.values()] == [[found]] * 4
    ended = [part["ended"] for part in report.values()]
    assert ended[0] == "failed with exit code 1, see gpu.log" and "exit code -6" in ended[1]
    assert ended[2:] == ["cut off after 2 s", "ok"] and report["hangs"]["seconds"] < 20
    assert "ValueError: what went wrong" in (tmp_path / "gpu.log").read_text()
    table = (tmp_path / "gpu.md").read_text()
    assert table.count("| method | tokens/s |\n|---|---|\n| ar | 3.14 |\n") == 4
    assert table in capsys.readouterr().out
    assert gpu.run_parts({"works": commands["works"]}, tmp_path) == 0
    refuses(gpu.main, capsys, "has a gpu.json", "--device", "cpu", "--out", tmp_path)


def test_all_parts_have_a_limit_and_together_take_eight_minutes_at_most():
    assert list(gpu.LIMITS) == list(gpu_parts.PARTS) and sum(gpu.LIMITS.values()) <= 8 * 60
