"""``bench pays``: what passes cost, what methods need and have."""

import pytest
import torch
from helpers import WEIGHTS, program, random_llama

from s2d.bench import __main__ as bench
from s2d.bench import pays
from s2d.checkpoint.config import read_config

PAYS = "pays --target 7b --limit 1 --rounds 1 --max-new-tokens 4".split()


def test_passes_are_timed_through_the_layers_that_are_asked_for(monkeypatch):
    """Each over as many rows, after as many cached positions, as is said."""
    monkeypatch.setattr(pays, "SECONDS", 0.001)
    model, passes = random_llama(0, max_position_embeddings=100), set()
    run_layers = model.run_layers

    def remember(hidden, end, mask, cache):
        passes.add((hidden.shape[1], end, cache.length))
        made = run_layers(hidden, end=end, mask=mask, cache=cache)
        tokens = torch.zeros(1, hidden.shape[1] + 36, dtype=torch.long)
        assert made.shape == hidden.shape and mask.shape[1] == tokens.shape[1]
        return made

    monkeypatch.setattr(model, "run_layers", remember)
    seconds = pays.time_passes(model, 3)
    assert [*seconds] == [*pays.ROWS] and min(seconds.values()) > 0
    assert passes == {(rows, 3, 36) for rows in pays.ROWS}


def test_costs_are_shown_next_to_those_of_one_row_of_the_target():
    lines = pays.table_of_costs({"target": {1: 10.0, 5: 14.0}, "exit 1": {1: 1.0, 5: 2.0}})
    assert lines[1] == ["target: ms / of one row", "10000.00 / 1.00", "14000.00 / 1.40"]
    assert lines[2] == ["exit 1: ms / of one row", "1000.00 / 0.10", "2000.00 / 0.20"]


@pytest.mark.parametrize("line", [[], ["--exits", "0", "--temperature", "1"]])
def test_the_whole_command(line, capsys, monkeypatch):
    """With all exits of the draft, and with exit 0, without a draft."""
    monkeypatch.setattr(pays, "SECONDS", 0.001)
    exits = [] if line else read_config(WEIGHTS / "mini-draft").drafting.exits
    assert program(bench.main, *PAYS, *line) == 0
    out, _ = capsys.readouterr()
    costs, found = [part for part in out.split("\n\n") if part.startswith("|")]
    assert costs.count("\n| exit ") == len(exits)
    rows = [row.strip("| ").split(" | ") for row in found.splitlines()[2:]]
    names = [row[0].strip() for row in rows]
    for _, cell in rows:  # what a method needs is what it has, divided by its speedup
        needs, has, speedup = map(float, cell.split(" / "))
        assert needs == pytest.approx(has / speedup, rel=0.02)
    # ar, each exit alone, and all exits in a fixed tree, a chain and a growing tree.
    assert names[0] == "ar" and len(names) == (len(exits) + 4 if exits else 2)
