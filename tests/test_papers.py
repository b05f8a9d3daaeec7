"""Errors of figures, and ``bench papers``: what is measured, and what is said of it."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import program, refuses

from s2d.bench import __main__ as bench
from s2d.bench import figures, papers
from s2d.bench.figures import Record, Turn
from s2d.bench.methods import parse_method
from s2d.bench.papers import EXPERIMENTS
from s2d.stats import Stats

SHORT = "--limit 1 --rounds 1 --max-new-tokens 4".split()


@pytest.mark.parametrize("groups, each", [(1, 12), (6, 2), (3, 12)])
def test_the_truth_is_within_two_standard_errors(groups, each, monkeypatch):
    """In 90 to 98 % of 400 runs, each with other questions of groups that differ."""
    monkeypatch.setattr(figures, "RESAMPLES", 200)
    rng = random.Random(0)
    every = {group: [] for group in range(groups)}  # the questions that there are: tokens, steps
    for steps in rng.choices(range(3, 12), k=1000):
        for group in every:
            every[group].append((round(steps * rng.uniform(2, 6) * (1 + group)), steps))
    tokens, steps = torch.tensor([*every.values()]).sum(dim=(0, 1)).tolist()
    inside = dict.fromkeys(("mat", "speedup"), 0)
    for _ in range(400):
        records = []
        asked = [(group, *one) for group in every for one in rng.choices(every[group], k=each)]
        for group, count, number in asked:
            made = SimpleNamespace(stats=Stats([2], [1] * number))
            seconds = {"ar": count, "s2d": number * rng.uniform(0.5, 1.5)}
            for method in seconds:
                turn = Turn([], [5] * count, seconds[method], made)
                records.append(Record(1, method, 0, {"group": group}, [turn]))
        column = figures.make_column(records, {})
        for name in inside:
            figure = column["s2d"][name]
            inside[name] += abs(figure.value - tokens / steps) <= 2 * figure.spread
    assert all(360 <= count <= 392 for count in inside.values()), inside
    assert f"{column['ar']['speedup']:.2f}" == "1.00 ±0.00"  # samples have the same questions
    few = figures.make_column(records[:8], {})["s2d"]["mat"]  # of four questions
    assert few.spread is None and "±" not in f"{few:.2f}"


def test_rows_of_experiments_are_names_of_methods():
    for name, experiment in EXPERIMENTS.items():
        rows = [row.format(size="7b") for row in experiment.rows.values()]
        assert {parse_method(row)["method"] for row in rows} <= {"sd", "s2d", "mcsd", "s2d-tree"}
        assert ("=drafts/" in "".join(rows)) == (name not in papers.SHIPPED)


def test_an_experiment(capsys, monkeypatch):
    monkeypatch.setattr(papers, "SIZES", ("7b",))
    assert program(bench.main, "papers", "--temperature", 1, "--only", "roots", *SHORT) == 0
    output = capsys.readouterr().out
    row = r"^\| (drafted|as published|coupled) +\| ([\d.]+) / ([\d.]+) "
    rows = re.findall(row, output, re.M)
    assert len(rows) == 3 and all(float(mat) > 1 for _, _, mat in rows)
    assert "\n- roots from the target are faster\n" in output
    refuses(bench.main, capsys, "no model folder at", "papers", "--only", "alignment")
