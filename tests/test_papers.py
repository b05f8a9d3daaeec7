"""The papers' experiments: published figures, drafts to compare, what is measured, what is said."""

import json
import re
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch
from helpers import WEIGHTS, assert_refused, program, refuses

from s2d import generate, load_model
from s2d.bench import __main__ as bench
from s2d.bench import lab, papers, papers_mcsd, papers_s2d
from s2d.bench.papers import EXPERIMENTS, table, told
from s2d.text.tokenizer import Tokenizer
from s2d.tree import KConfig, ancestor_mask

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
            pairs = [cell.split(" / ") for cell in cells.split("|")]
            assert len(pairs) == len(lab.SIZES) * len(lab.TEMPERATURES) + 1
            speeds = [float(pair[0]) for pair in pairs if pair[0]]
            found[row.removesuffix(f" ({papers_s2d.MODELS})")] = (
                speeds,
                [float(pair[1]) for pair in pairs if len(pair) == 2],
            )
    assert found == PUBLISHED


def invented(name, value):
    """A result of an experiment's form, in which ``value(row, column)`` is each of its figures."""
    rows, columns = [], [f"seed {seed} T={t}" for seed in (1, 2) for t in (0, 1)]

    class Spy(lab.Lab):
        def __init__(self):
            self.args = SimpleNamespace(limit=0)

        def timed(self, ways):
            rows.extend(ways("7b"))

        counted = lambda self, ways: rows.extend(ways)  # noqa: E731
        decision = draft = target = lambda self, *names: None  # noqa: E731
        tokenizer = None

    if name in ("quality", "masks"):
        rows += {"quality": ["alone", "published", "coupled"], "masks": ["slice", "anew"]}[name]
    else:
        EXPERIMENTS[name].measure(Spy())
    keys = EXPERIMENTS[name].measures + ("accepted", "mat")
    return {c: {row: dict.fromkeys(keys, value(row, c)) for row in rows} for c in columns}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_and_verdicts_are_made_of_the_result_alone(name):
    """Whatever is measured, the table says it, and some result turns the verdict round."""
    result = invented(name, lambda row, column: 1 + len(row) + int(column[5]) / 7)
    lines = table(EXPERIMENTS[name], result)
    ours = {line[0]: line[1:] for line in lines[1 + len(EXPERIMENTS[name].published) :]}
    columns = [*result]
    assert [*ours] == [*result[columns[0]]] and lines[0] == ["", *columns, "mean"]
    for row, cells in ours.items():
        for key, number in enumerate(EXPERIMENTS[name].measures):
            figures = [result[column][row][number] for column in columns]
            for cell, figure in zip(cells, [*figures, sum(figures) / 4]):
                assert cell.split(" / ")[key] == format(figure, papers.FORMATS[number])
    verdicts = set()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.rand, (), generator=generator)
        drawn = invented(name, lambda row, c, draw=draw: 0.2 + 3 * draw().item())
        verdicts |= {told(name, drawn, False).rsplit("\n\n", 1)[1].partition(":")[0]}
    assert {"holds here", "does not hold here"} == verdicts or verdicts > {"helps here"}


def test_a_gain_counts_where_seeds_agree_better_than_that():
    result = {}
    gains = {"seed 1 T=0": 1.0, "seed 1 T=1": 0.6, "seed 2 T=0": 0.3, "seed 2 T=1": 0.5}
    for column, gain in gains.items():
        result[column] = {"one": {"mat": 2.0}, "other": {"mat": 2.0 + gain}}
    assert lab.gain_by_seed(result, "other", "one") == pytest.approx((0.6, 0.4))
    assert lab.helps(0.6, 0.4) == "helps here" and lab.helps(-0.6, 0.4) == "harms here"
    assert lab.helps(0.6, 0.7) == lab.helps(-0.6, 0.7) == "no difference beyond noise here"


def arguments_of(**changes):
    settings = dict(limit=1, rounds=1, max_new_tokens=6, device="cpu", dtype="auto", drafts=None)
    return SimpleNamespace(**settings | changes)


def test_accepted_tokens_are_counted_as_one_prompt_after_the_other_gives_them(monkeypatch):
    monkeypatch.setattr(lab, "SIZES", ("7b", "13b"))
    monkeypatch.setattr(lab, "folder_of", lambda drafts, name, seed: WEIGHTS / name)
    monkeypatch.setattr(lab, "SHIPPED", "none")
    here = lab.Lab(arguments_of())
    how = dict(method="s2d", thresholds=(0.9, 0.9, 0.0), draft_length=4, stop=0.0)
    found = here.counted({"row": ("mini-draft", how)})
    assert [*found] == ["seed 1 T=0", "seed 1 T=1", "seed 2 T=0", "seed 2 T=1"]
    tokenizer = Tokenizer(WEIGHTS / "mini-7b")
    for temperature in (0.0, 1.0):
        tokens = steps = layers = drafted = 0
        for size in ("7b", "13b"):
            models = load_model(WEIGHTS / f"mini-{size}"), load_model(WEIGHTS / "mini-draft")
            for number, question in enumerate(here.questions):
                prompt, seed = tokenizer.encode_chat(question["turns"][:1]), number
                asked = dict(temperature=temperature, max_new_tokens=6, seed=seed)
                one = generate(models[0], prompt, models[1], **asked, **how)
                tokens, steps = tokens + len(one.tokens), steps + one.stats.steps
                left = one.stats.exit_counts.elements()  # the exit of each drafted token
                layers, drafted = layers + sum(left), drafted + one.stats.exit_counts.total()
        cell = found[f"seed 1 T={temperature:g}"]["row"]
        assert cell == pytest.approx({"mat": tokens / steps, "layers": layers / drafted})


def test_a_slice_is_the_mask_that_would_be_made_anew(monkeypatch):
    """What is timed gives the same masks, and these are the ancestors among the nodes so far."""
    seen = {}

    def remember(make, levels):
        seen.setdefault(make.__name__, []).append([make(*level) for level in levels])
        return 1.0

    monkeypatch.setattr(papers_mcsd, "timed_once", remember)
    result = papers_mcsd.masks(None)
    assert [*result] == [*papers_mcsd.MASKED]
    for sliced, anew in zip(seen["sliced"], seen["anew"], strict=True):
        for one, other in zip(sliced, anew, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    parents = KConfig((10, 4, 2)).parents()
    last = seen["anew"][-1][-1][1]
    assert torch.equal(last[:, -130:] == 0, ancestor_mask(parents)[50:])


def papers_run(*arguments):
    return program(bench.main, "papers", "--limit", "1", "--max-new-tokens", "4", *arguments)


def test_what_was_measured_is_kept_and_not_measured_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lab, "SIZES", ("7b", "13b"))  # the large one takes long
    out, plots = tmp_path / "out", tmp_path / "plots"
    where = "--only", "masks", "targets", "--out", out, "--plot", plots
    assert papers_run(*where) == 0
    first = capsys.readouterr().out
    kept = json.loads((out / "targets.json").read_text())
    assert told("targets", kept["result"], False) in first
    assert kept["settings"]["max_new_tokens"] == "4" and kept["experiment"] == "targets"
    assert [*kept["result"]] == ["7b T=0", "13b T=0", "7b T=1", "13b T=1"]
    assert kept["result"]["7b T=0"]["s2d"]["mat"] > 1
    for name in ("masks", "targets"):
        picture = (plots / f"{name}.svg").read_text()
        assert picture.count("made anew" if name == "masks" else "sd, exit 2") >= 1

    def not_again(measure):
        @wraps(measure)
        def never(lab):
            raise AssertionError("measured again")

        return never

    again = {n: replace(e, measure=not_again(e.measure)) for n, e in EXPERIMENTS.items()}
    monkeypatch.setattr(papers, "EXPERIMENTS", again)
    assert papers_run(*where) == 0 and capsys.readouterr().out == first
    changed = "was measured with max_new_tokens 4; name another folder"
    assert_refused(capsys, changed, papers_run, *where, "--max-new-tokens", "5")
    whole = json.loads((out / "masks.json").read_text())
    other = json.loads((out / "targets.json").read_text())
    damaged = [{"result": 1}, other, whole | {"settings": 5}, whole | {"settings": {"limit": [1]}}]
    damaged += [whole | {"result": result} for result in (None, {}, [], {"a": {}}, {"a": {"b": 1}})]
    cells = {"a": {"b": {"µs": 1.0}}, "c": {"d": {"µs": 1.0}}}, {"a": {"b": {"µs": None}}}
    for each in damaged + [whole | {"result": result} for result in cells]:
        (out / "masks.json").write_text(json.dumps(each))
        assert_refused(capsys, "no result that was written here", papers_run, *where)
    changed = {"settings": whole["settings"] | {"threads": "77"}}
    (out / "masks.json").write_text(json.dumps(whole | changed))
    assert_refused(capsys, "was measured with threads 77; name another", papers_run, *where)
    (out / "masks.json").write_text(json.dumps(whole))
    file = out / "masks.json"
    assert_refused(capsys, f"{file} is a file", papers_run, "--only", "masks", "--out", file)
    (plots / "targets.svg").write_text("<svg/>")
    assert_refused(capsys, "no picture that was written here", papers_run, *where)


def test_what_needs_trained_drafts_is_left_out_or_refused(tmp_path, capsys, monkeypatch):
    missing = "alignment: give --drafts, made by python -m s2d.train ablations"
    assert_refused(capsys, missing, papers_run, "--only", "masks", "alignment")
    refuses(bench.main, capsys, "invalid choice: 'x'", "papers", "--only", "x")
    asked = "--only", "alignment", "--drafts", tmp_path / "none"
    assert_refused(capsys, f"there is no {tmp_path}/none; give", papers_run, *asked)
    some = {name: EXPERIMENTS[name] for name in ("masks", "pretraining")}
    monkeypatch.setattr(papers, "EXPERIMENTS", some)
    assert papers_run() == 0
    said = capsys.readouterr()
    assert "left out are pretraining: give --drafts" in said.err and "`masks`: µs" in said.out
