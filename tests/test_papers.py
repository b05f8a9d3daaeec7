"""The papers' experiments: what is measured, and what is said of it."""

import re

import pytest
from helpers import program, refuses

from s2d.bench import __main__ as bench
from s2d.bench import papers
from s2d.bench.methods import parse_method
from s2d.bench.papers import EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_are_names_of_methods(name):
    experiment = EXPERIMENTS[name]
    for row in experiment.rows.values():
        assert parse_method(row.format(size="7b"))["method"] in ("sd", "s2d", "mcsd", "s2d-tree")
        assert ("=drafts/" in "".join(experiment.rows.values())) == (name not in papers.SHIPPED)


def test_the_whole_command(capsys, monkeypatch):
    monkeypatch.setattr(papers, "SIZES", ("7b",))
    words = "papers --limit 1 --rounds 1 --max-new-tokens 4 --temperature 1 --only roots".split()
    assert program(bench.main, *words) == 0
    output = capsys.readouterr().out
    row = r"^\| (drafted|as published|coupled) +\| ([\d.]+) ±[\d.]+ / ([\d.]+) "
    rows = re.findall(row, output, re.M)
    assert len(rows) == 3 and all(float(mat) > 1 for _, _, mat in rows)
    assert "\n- roots from the target are faster\n" in output
    refuses(bench.main, capsys, "no model folder at", "papers", "--only", "alignment")
