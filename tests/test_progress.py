"""Long jobs say how far they are, and short ones say nothing; and how programs end."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT

from s2d.checkpoint import notices


def test_progress_is_a_line_every_ten_seconds(monkeypatch, capsys):
    """What is done, of how much; the clock is the test's."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(notices, "time", clock)
    for item in notices.progress(range(100), "reading: rows", 100):
        clock.now += 12 if item == 0 else 0.25
    said = [f"reading: rows: {done} of 100" for done in (1, 41, 81)]
    assert capsys.readouterr().err.splitlines() == said


# A program in which Ctrl-C is pressed when PyTorch is imported.
INTERRUPTED = """
import os, runpy, signal, sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("line", ["run --target 7b", "s2d.proof", "s2d.bench"])
def test_ctrl_c_while_packages_are_imported_is_one_line(line):
    command = [sys.executable, "-c", INTERRUPTED, *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


PROGRAM = """
import sys
from s2d.cli.ending import run_program

def work():
    "Works."
    print("日" * 99999)

def need():
    import nowhere

def grow():
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

def report():
    print("answered", file=sys.stderr)

sys.exit(run_program("it", globals()[sys.argv.pop(1)]))
"""
ENDS = {  # what a shell runs: the exit code, stderr
    "it work | head -c 6": (141, ""),
    "it work > /dev/full": (2, "it: No space left on device\n"),
    "PYTHONIOENCODING=cp1252 it work | grep -q '^.u65e5'": (0, ""),
    "it work --word": (2, "it: unrecognized arguments: --word\n"),
    "it need": (2, "it: No module named 'nowhere'\n"),
    "it grow": (2, "it: DefaultCPUAllocator: can't allocate memory\n"),
    "it report": (0, "answered\n"),
    "it report 2> /dev/full": (0, ""),
    "it need 2>&-": (2, ""),
}


@pytest.mark.parametrize("line", ENDS)
def test_how_a_program_ends(line, tmp_path):
    (tmp_path / "it").write_text(f"#!{sys.executable}{PROGRAM}")
    (tmp_path / "it").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == ENDS[line]
