"""``bench pays`` and ``bench papers``: what is measured, and what is said of it."""

import re

import pytest
from helpers import program, random_llama, refuses

from s2d.bench import __main__ as bench
from s2d.bench import papers, pays
from s2d.bench.methods import parse_method
from s2d.bench.papers import EXPERIMENTS

SHORT = "--limit 1 --rounds 1 --max-new-tokens 4".split()


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


@pytest.mark.parametrize("exits", [[], ["--exits", "0"]])
def test_what_passes_cost_and_what_methods_have(exits, capsys, monkeypatch):
    """With all exits of the draft, and with exit 0, without a draft."""
    monkeypatch.setattr(pays, "SECONDS", 0.001)
    words = ["pays", "--target", "7b", "--temperature", "0", *SHORT, *exits]
    assert program(bench.main, *words) == 0
    costs, found = re.findall(r"^\|.*?(?=\n\n)", capsys.readouterr().out, re.M | re.S)
    columns = ["target"] if exits else ["target", "exit 2", "exit 3"]
    assert re.split(r" *\| *", costs.splitlines()[0])[2:-1] == columns
    assert re.match(r"\| 1 +\| [\d.]+ / 1.00 ", costs.splitlines()[2])
    number = r"[\d.]+ ±[\d.]+"
    rows = re.findall(rf"^\| ([\w:=,-]+) +\| {number} / {number} / {number}", found, re.M)
    # ar, each exit alone, and all exits in a fixed tree, a chain and a growing tree.
    assert rows[0] == "ar" and len(rows) == (2 if exits else 6)


def test_rows_of_experiments_are_names_of_methods():
    for name, experiment in EXPERIMENTS.items():
        rows = [row.format(size="7b") for row in experiment.rows.values()]
        assert {parse_method(row)["method"] for row in rows} <= {"sd", "s2d", "mcsd", "s2d-tree"}
        assert ("=drafts/" in "".join(rows)) == (name not in papers.SHIPPED)


def test_an_experiment(capsys, monkeypatch):
    monkeypatch.setattr(papers, "SIZES", ("7b",))
    assert program(bench.main, "papers", "--temperature", 1, "--only", "roots", *SHORT) == 0
    output = capsys.readouterr().out
    row = r"^\| (drafted|as published|coupled) +\| ([\d.]+) ±[\d.]+ / ([\d.]+) "
    rows = re.findall(row, output, re.M)
    assert len(rows) == 3 and all(float(mat) > 1 for _, _, mat in rows)
    assert "\n- roots from the target are faster\n" in output
    refuses(bench.main, capsys, "no model folder at", "papers", "--only", "alignment")
