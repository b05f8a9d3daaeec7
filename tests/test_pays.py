"""``bench pays``: what passes cost, what methods need and have."""

import re

import pytest
from helpers import program, random_llama

from s2d.bench import __main__ as bench
from s2d.bench import pays

PAYS = "pays --target 7b --limit 1 --rounds 1 --max-new-tokens 4 --temperature 0".split()


def test_passes_are_timed_through_the_layers_that_are_asked_for(monkeypatch):
    """Each over as many rows, after as many cached positions, as is said."""
    monkeypatch.setattr(pays, "SECONDS", 0.001)
    model, passes = random_llama(0, max_position_embeddings=100), set()
    run_layers = model.run_layers

    def remember(hidden, end, mask, cache):
        passes.add((hidden.shape[1], end, cache.length))
        assert mask.shape[1] == hidden.shape[1] + 36
        return run_layers(hidden, end=end, mask=mask, cache=cache)

    monkeypatch.setattr(model, "run_layers", remember)
    column = pays.time_passes(model, 3)
    assert all(column[str(rows)]["ms"] > 0 for rows in pays.ROWS)
    assert passes == {(rows, 3, 36) for rows in pays.ROWS}


@pytest.mark.parametrize("line", [[], ["--exits", "0"]])
def test_the_whole_command(line, capsys, monkeypatch):
    """With all exits of the draft, and with exit 0, without a draft."""
    monkeypatch.setattr(pays, "SECONDS", 0.001)
    assert program(bench.main, *PAYS, *line) == 0
    costs, found = re.findall(r"^\|.*?(?=\n\n)", capsys.readouterr().out, re.M | re.S)
    exits = [] if line else ["exit 2", "exit 3"]
    assert re.split(r" *\| *", costs.splitlines()[0])[2:-1] == ["target", *exits]
    assert re.match(r"\| 1 +\| [\d.]+ / 1.00 ", costs.splitlines()[2])
    number = r"[\d.]+ ±[\d.]+"
    rows = re.findall(rf"^\| ([\w:=,-]+) +\| {number} / {number} / {number}", found, re.M)
    # ar, each exit alone, and all exits in a fixed tree, a chain and a growing tree.
    assert rows[0] == "ar" and len(rows) == (6 if exits else 2)
