"""The table of what breaks losslessness: what is right is exact, and each mistake shows."""

import pytest

from s2d.lesson import lossless
from s2d.lesson.lossless import RIGHT, SHAPES, WRONG, measure


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    monkeypatch.setattr(lossless, "POINTS", 256)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name):
    for widths in SHAPES.values():
        distance, accepted, is_exact = measure(RIGHT[name], widths)
        assert distance < (1e-12 if is_exact else 0.02) and accepted > 0.5
        assert is_exact or "noise" in name


@pytest.mark.parametrize("name", WRONG)
def test_every_mistake_shows(name):
    """In at least one of the shapes, and the same on every run."""
    found = [measure(WRONG[name], widths) for widths in SHAPES.values()]
    assert max(each.distance for each in found) > (1e-3 if found[0].is_exact else 0.04)
    assert measure(WRONG[name], SHAPES["chain 1,1"]) == found[0]


def test_the_table(capsys):
    lossless.main()
    lines = capsys.readouterr().out.splitlines()[4:]
    assert len(lines) == len(RIGHT) + len(WRONG) > 12
    for line in lines[:2]:  # enumerated
        assert [cell.partition(" / ")[0] for cell in line.split(" | ")[1:]] == ["0", "0"]
