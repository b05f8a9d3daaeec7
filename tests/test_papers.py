"""``bench papers``: what is measured, and what is said of it."""

import re

from helpers import program, refuses

from s2d.bench import __main__ as bench
from s2d.bench import papers
from s2d.bench.methods import parse_method
from s2d.bench.papers import EXPERIMENTS

SHORT = "--limit 1 --rounds 1 --max-new-tokens 4".split()


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
