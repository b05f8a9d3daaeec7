"""Long jobs say how far they are, and short ones say nothing."""

from types import SimpleNamespace

from helpers import WEIGHTS

from s2d import load_model
from s2d.checkpoint import notices


def test_progress_is_a_line_every_ten_seconds(monkeypatch, capsys):
    """What is done, of how much; the clock is the test's."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(notices, "time", clock)
    for item in notices.progress(range(100), "reading: rows", 100):
        clock.now += 12 if item == 0 else 0.25
    said = [f"reading: rows: {done} of 100" for done in (1, 41, 81)]
    assert capsys.readouterr().err.splitlines() == said


def test_a_long_job_says_how_far_it_is(monkeypatch, capsys):
    """At every unit here."""
    monkeypatch.setattr(notices, "PROGRESS_SECONDS", 0)
    load_model(WEIGHTS / "mini-7b")
    assert "tensors: 92 of 93" in capsys.readouterr().err.splitlines()[-1]
