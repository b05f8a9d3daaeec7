"""The papers' experiments: what is measured, and what is said of it."""

import re

import pytest
import torch
from helpers import program, refuses

from s2d.bench import __main__ as bench
from s2d.bench import papers
from s2d.bench.methods import parse_method
from s2d.bench.papers import EXPERIMENTS
from s2d.bench.tables import with_means


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_and_verdicts_are_made_of_the_result_alone(name):
    """Whatever is measured, the table says it, and some result turns the verdict round."""
    about, verdicts = EXPERIMENTS[name], set()
    rows = ["ar", *about.rows]
    measures = ["speedup", "mat", *(claim.partition(":")[0] for claim in about.claims)]
    for seed in range(60):
        generator, result = torch.Generator().manual_seed(seed), {}
        for column in ("7b T=0", "7b T=1", "13b T=0", "13b T=1"):
            drawn = (0.2 + 3 * torch.rand(len(rows), generator=generator)).tolist()
            result[column] = {row: dict.fromkeys(measures, x) for row, x in zip(rows, drawn)}
        text = papers.describe(name, with_means(result))
        verdicts.add(re.search(r"(\w[\w ]*) here: ", text)[1])
    assert {"Holds", "Does not hold"} <= verdicts
    last = rows[-1]
    cells = re.search(rf"^\| {re.escape(last)} +\| (.*) \|$", text, re.M)[1].split(" | ")
    figures = [column[last]["speedup"] for column in result.values()]
    for cell, figure in zip(cells, [*figures, sum(figures) / 4], strict=True):
        assert cell.split(" / ")[0] == format(figure, ".2f")


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
def test_rows_are_names_of_methods(name, tmp_path):
    experiment = EXPERIMENTS[name]
    for row in experiment.rows.values():
        method = parse_method(row.format(size="7b"), None, tmp_path)
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
    missing = "alignment: give --drafts, see s2d/bench/papers.md"
    refuses(bench.main, capsys, missing, "papers", "--only", "alignment")
