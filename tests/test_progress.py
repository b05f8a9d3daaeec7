"""Long jobs say how far they are, and short ones say nothing."""

from types import SimpleNamespace

import pytest
from helpers import WEIGHTS

from s2d import load_model
from s2d.bench.measure import measure
from s2d.checkpoint import notices


@pytest.mark.parametrize("total", [100, None])
def test_progress_is_a_line_every_ten_seconds(total, monkeypatch, capsys):
    """What is done, of how much; the clock is the test's."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(notices, "time", clock)
    for item in notices.progress(range(100), "reading: rows", total):
        clock.now += 12 if item == 0 else 0.25
    said = capsys.readouterr().err.splitlines()
    if total is None:
        assert said == ["reading: rows: 1", "reading: rows: 41", "reading: rows: 81"]
    else:
        assert said == [
            "reading: rows: 1 of 100",
            "reading: rows: 41 of 100",
            "reading: rows: 81 of 100",
        ]


def test_what_has_not_begun_has_no_time_left(monkeypatch, capsys):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(notices, "time", clock)

    def slow():
        clock.now = 15.0
        yield

    assert list(notices.progress(slow(), "downloading: MB", 93)) == [None]
    assert capsys.readouterr().err == "downloading: MB: 0 of 93\n"


def load():
    load_model(WEIGHTS / "mini-7b")


def answer():
    measure({"ar": None, "s2d": None}, range(3), 3, "7b T=0", lambda *_: [{}])


JOBS = {load: "tensors: 92 of 93", answer: "7b T=0: turns of all methods: 9 of 10"}


@pytest.mark.parametrize("job", JOBS)
def test_a_long_job_says_how_far_it_is(job, monkeypatch, capsys):
    """At every unit here; as it is, a job of less than ten seconds says nothing."""
    job()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(notices, "PROGRESS_SECONDS", 0)
    job()
    assert JOBS[job] in capsys.readouterr().err.splitlines()[-1]
