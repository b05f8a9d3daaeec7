"""The papers' experiments: published figures, what is measured, what is said of it."""

import json
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import WEIGHTS, program, refuses

from s2d import generate, load_model, notices
from s2d.bench import __main__ as bench
from s2d.bench import experiments, lab, papers
from s2d.bench.experiments import EXPERIMENTS
from s2d.bench.lab import Finding
from s2d.checkpoint.tokenizer import Tokenizer

# Copied from the papers' tables once more, by another hand: speedups, then accepted tokens.
PUBLISHED = {
    "SoFT + S2D": (
        [1.34, 1.38, 1.95, 1.27, 1.38, 1.98, 1.55],
        [2.86, 2.76, 2.36, 3.01, 2.89, 2.44],
    ),
    "early exit at 6": (
        [0.98, 1.00, 1.32, 0.96, 1.03, 1.37, 1.11],
        [1.51, 1.51, 1.46, 1.52, 1.51, 1.53],
    ),
    "early exit at 9": (
        [1.08, 1.05, 1.54, 0.99, 1.12, 1.57, 1.22],
        [1.99, 1.98, 1.80, 2.04, 2.04, 1.86],
    ),
}


def test_published_figures_have_their_source_and_stand_in_the_order_of_our_columns():
    found = {}
    for each in EXPERIMENTS.values():
        assert re.search(r"arXiv 24\d\d\.\d{5}$", each.source)
        for row, cells in each.published.items():
            pairs = [list(map(float, cell.split(" / "))) for cell in cells.split("|")]
            figures = [pair[0] for pair in pairs], [pair[1] for pair in pairs if pair[1:]]
            found[row.removesuffix(f" ({experiments.MODELS})")] = figures
    assert found == PUBLISHED


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_and_verdicts_are_made_of_the_result_alone(name):
    """Whatever is measured, the table says it, and some result turns the verdict round."""
    about, verdicts = EXPERIMENTS[name], set()
    rows, kind = about.rows, "seed" if about.measure is lab.count_tokens else "size"
    for seed in range(60):
        generator, result = torch.Generator().manual_seed(seed), {}
        for column in (f"{kind} {number} T={T}" for number, T in product((1, 2), (0, 1))):
            drawn = (0.2 + 3 * torch.rand(len(rows), generator=generator)).tolist()
            result[column] = {row: dict.fromkeys(about.measures, x) for row, x in zip(rows, drawn)}
        text = papers.as_text(name, about, result, True)
        verdicts.add(re.search(r"(\w[\w ]*) here: ", text)[1])
    assert "Holds" in verdicts and len(verdicts) > 1
    key, last = about.measures[0], list(rows)[-1]
    cells = re.search(rf"^\| {re.escape(last)} \| (.*) \|$", text, re.M)[1].split(" | ")
    figures = [column[last][key] for column in result.values()]
    for cell, figure in zip(cells, [*figures, sum(figures) / 4], strict=True):
        assert cell.split(" / ")[0] == format(figure, papers.FORMATS[key])


def test_findings_are_judged_by_a_margin_or_by_what_seeds_differ_by():
    result = {}
    gains = {"seed 1 T=0": 1.0, "seed 1 T=1": 0.6, "seed 2 T=0": 0.3, "seed 2 T=1": 0.5}
    for column, gain in gains.items():
        result[column] = {"less": {"mat": 2.0}, "more": {"mat": 2.0 + gain}}  # 0.8 and 0.4 more

    def judged(row, other, result, no_worse=False):
        return papers.judge(Finding("", [row], [other], no_worse=no_worse), "mat", result)[0]

    def by_size(more):
        return {"7b T=0": {"less": {"mat": 1.0}, "more": {"mat": more}}}

    assert judged("more", "less", by_size(1.11)) == "Holds"
    assert judged("less", "more", by_size(1.11)) == "Does not hold"
    assert judged("more", "less", by_size(1.09)) == judged("less", "more", by_size(1.09))
    assert judged("less", "more", by_size(1.09)) == "Undecided"
    assert judged("more", "less", result) == "Holds"
    assert judged("less", "more", result) == "Does not hold"
    assert judged("less", "more", result, no_worse=True) == "Does not hold"
    result["seed 1 T=0"]["more"]["mat"] = 3.8  # now 1.2 and 0.4 more
    assert judged("more", "less", result) == judged("less", "more", result) == "Undecided"
    assert judged("less", "more", result, no_worse=True) == "Holds"


def test_accepted_tokens_are_counted_as_one_prompt_after_the_other_gives_them(monkeypatch, capsys):
    monkeypatch.setattr(lab, "SIZES", ("7b",))
    settings = dict(limit=1, rounds=1, max_new_tokens=6, device="cpu", dtype="auto", drafts=None)
    here = lab.Lab(SimpleNamespace(**settings))
    row = "s2d:exits=2,3,4:thresholds=0.9,0.9,0:draft_length=4:stop=0:rejection"
    monkeypatch.setattr(notices, "PROGRESS_SECONDS", 0)
    found = lab.count_tokens(here, replace(EXPERIMENTS["sorted"], rows={"row": row}))
    assert ": 3 of 4, " in capsys.readouterr().err.splitlines()[-1]
    assert [*found] == ["seed 1 T=0", "seed 1 T=1", "seed 2 T=0", "seed 2 T=1"]
    target, draft = load_model(WEIGHTS / "mini-7b"), load_model(WEIGHTS / "mini-draft")
    tokens, steps, exits = 0, 0, []
    for number, question in enumerate(here.questions):
        prompt = Tokenizer(WEIGHTS / "mini-7b").encode_chat(question["turns"])
        how = dict(temperature=1.0, max_new_tokens=6, seed=number, stop=0.0, rule="rejection")
        how |= dict(exits=(2, 3, 4), thresholds=(0.9, 0.9, 0.0), draft_length=4)
        one = generate(target, prompt, draft, "s2d", **how)
        tokens, steps = tokens + len(one.tokens), steps + one.stats.steps
        exits += one.stats.exit_counts.elements()  # the exit of each drafted token
    expected = {"mat": tokens / steps, "layers": sum(exits) / len(exits)}
    row = found["seed 1 T=1"]["row"]
    assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_what_was_measured_is_kept_and_not_measured_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lab, "SIZES", ("7b",))
    monkeypatch.setattr(lab, "TEMPERATURES", (1.0,))
    arguments = ["papers", "--limit", "1", "--max-new-tokens", "4"]
    arguments += ["--only", "masks", "roots", "--out", tmp_path]
    assert program(bench.main, *arguments) == 0
    first = capsys.readouterr().out
    cells = json.loads((tmp_path / "roots.json").read_text())["result"]["7b T=1"]
    assert all(cell["mat"] > 1 and cell["accepted"] > 0.5 for cell in cells.values())
    monkeypatch.setattr(lab, "load_model", lambda *_, **__: pytest.fail("it is measured again"))
    assert program(bench.main, *arguments) == 0 and capsys.readouterr().out == first
    refuses(bench.main, capsys, "name another folder", *arguments, "--max-new-tokens", "5")
    monkeypatch.setattr(papers, "WEIGHTS", tmp_path)  # as if the miniatures were other ones
    refuses(bench.main, capsys, "name another folder", *arguments)
    missing = "alignment: give --drafts, made by python -m s2d.bench papers train"
    refuses(bench.main, capsys, missing, "papers", "--only", "alignment")
