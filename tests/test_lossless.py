"""The table of what breaks losslessness: what is right is exact, and each mistake shows."""

import pytest

from s2d.lesson import lossless
from s2d.lesson.lossless import RULES, SHAPES, Mistaken, measure
from s2d.rules import Rejection


@pytest.fixture(autouse=True)
def few_points(monkeypatch):
    monkeypatch.setattr(lossless, "POINTS", 256)


@pytest.mark.parametrize("name", RULES)
def test_what_is_right_is_exact_and_every_mistake_shows(name):
    """In at least one of the shapes, and the same on every run."""
    chain, tree = [measure(RULES[name], widths) for widths in SHAPES.values()]
    assert chain.is_exact == tree.is_exact == ("noise" not in name)
    assert chain.accepted > 0.5 and tree.accepted > 0.5
    worst = max(chain.distance, tree.distance)
    if name.startswith("right"):
        assert worst < (1e-12 if chain.is_exact else 0.02)
    else:
        assert worst > (1e-3 if chain.is_exact else 0.04)
    assert measure(RULES[name], SHAPES["chain 1,1"]) == chain


@pytest.mark.parametrize("widths", [*SHAPES.values(), (2, 2)])
def test_without_its_mistake_a_rule_is_right(widths):
    right = measure(lambda draws: Rejection(lossless.distribution, draws), widths)
    assert measure(lambda draws: Mistaken("none", draws), widths) == right


def test_the_table(capsys):
    """The first two rows are enumerated."""
    lossless.main()
    lines = capsys.readouterr().out.splitlines()[4:]
    assert len(lines) == len(RULES) == 15
    for line in lines[:2]:
        assert [cell.partition(" / ")[0] for cell in line.split(" | ")[1:]] == ["0", "0"]
