"""The papers' experiments: what is measured, and what is said of it."""

import re

import pytest
from helpers import program, refuses

from s2d.bench import __main__ as bench
from s2d.bench import papers
from s2d.bench.methods import parse_method
from s2d.bench.papers import EXPERIMENTS


def test_claims_are_judged_by_a_margin():
    def decided(claim, more):
        means = {"less": {"mat": 1.0}, "more": {"mat": more}}
        return papers.decide(f"mat: {claim}", means).partition(" here")[0]

    assert decided("more > less", 1.11) == decided("less | more > less", 1.2) == "Holds"
    assert decided("less > more", 1.11) == decided("less >= more", 1.11) == "Does not hold"
    assert decided("more > less", 1.09) == decided("less > more", 1.09) == "Undecided"
    assert decided("less >= more", 1.09) == "Holds"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_are_names_of_methods(name):
    experiment = EXPERIMENTS[name]
    for row in experiment.rows.values():
        assert parse_method(row.format(size="7b"))["method"] in ("sd", "s2d", "mcsd", "s2d-tree")
        assert ("=drafts/" in "".join(experiment.rows.values())) == (name not in papers.SHIPPED)
    named = {row for claim in experiment.claims for row in re.split(r": | >=? | \| ", claim)[1:]}
    assert named <= {"ar", *experiment.rows}


def test_the_whole_command(capsys, monkeypatch):
    monkeypatch.setattr(papers, "SIZES", ("7b",))
    words = "papers --limit 1 --rounds 1 --max-new-tokens 4 --temperature 1 --only roots".split()
    assert program(bench.main, *words) == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^\| (drafted|as published|coupled) +\| ([\d.]+) / ([\d.]+) ", output, re.M)
    assert len(rows) == 3 and all(float(mat) > 1 for _, _, mat in rows)
    assert output.count(" here: ") == 2
    refuses(bench.main, capsys, "no model folder at", "papers", "--only", "alignment")
