"""The papers' experiments: what is measured, and what is said of it."""

import re

import pytest
from helpers import program, refuses

from s2d.bench import __main__ as bench
from s2d.bench import papers
from s2d.bench.methods import parse_method
from s2d.bench.papers import EXPERIMENTS
from s2d.bench.tables import with_means


def test_claims_are_judged_by_a_margin():
    def decided(claim, more):
        cells = {}
        for measure in ("mat", "speedup"):
            cells |= {measure: more}
        result = {"7b T=0": {"less": dict.fromkeys(cells, 1.0), "more": cells}}
        return papers.decide(claim, with_means(result)).partition(" here")[0]

    assert decided("speedup: more > less", 1.11) == "Holds"
    assert decided("speedup: less > more", 1.11) == "Does not hold"
    assert decided("speedup: more > less", 1.09) == "Undecided"
    assert decided("speedup: less > more", 1.09) == "Undecided"
    assert decided("mat: more > less", 1.04) == "Undecided"
    assert decided("mat: more > less", 1.06) == decided("mat: less >= more", 1.04) == "Holds"
    assert decided("mat: less >= more", 1.06) == "Does not hold"
    assert decided("mat: less | more > less", 1.2) == "Holds"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_are_names_of_methods(name):
    experiment = EXPERIMENTS[name]
    for row in experiment.rows.values():
        method = parse_method(row.format(size="7b"), None)
        assert method.options["method"] in ("sd", "s2d", "mcsd", "s2d-tree")
    named = {row for claim in experiment.claims for row in re.split(r": | >=? | \| ", claim)[1:]}
    assert named <= {"ar", *experiment.rows}


def test_the_whole_command(capsys, monkeypatch):
    monkeypatch.setattr(papers, "SIZES", ("7b",))
    arguments = ["papers", "--limit", "1", "--max-new-tokens", "4", "--temperature", "1"]
    assert program(bench.main, *arguments, "--only", "roots") == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^\| (drafted|as published|coupled) +\| ([\d.]+) / ([\d.]+) ", output, re.M)
    assert len(rows) == 3 and all(float(mat) > 1 for _, _, mat in rows)
    assert output.count(" here: ") == 3
    refuses(bench.main, capsys, "no model folder at", "papers", "--only", "alignment")
