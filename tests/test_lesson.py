"""The lesson: what its cells show is what is stored, and its exercises tell mistakes by name."""

import ast
import io
import json
import re
from contextlib import redirect_stdout
from inspect import getdoc

import numpy as np
import pytest
import torch
from helpers import ROOT

from s2d.lesson import answers
from s2d.lesson.checks import mark
from s2d.lesson.mistakes import MISTAKES
from s2d.mask import inputs
from s2d.model import move_up
from s2d.proof import lossless
from s2d.rules import residual
from s2d.tree import Node

LESSON = ROOT / "s2d/lesson/lesson.ipynb"
SLOW = "the best token of q|from all of p"


def stored(cell):
    """What a cell of the notebook shows: its texts, and its pictures."""
    data = [output.get("data", output) for output in cell["outputs"]]
    texts = ["".join(each.get("text", each.get("text/plain"))) for each in data]
    return "".join(texts), [each["image/svg+xml"] for each in data if "image/svg+xml" in each]


def run_cell(cell, names):
    """What the cell shows when it is run after others, which have left ``names``."""
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else ast.parse("None").body[0]
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if value is None:
        return said.getvalue(), []
    return said.getvalue() + repr(value), [value._repr_svg_()]


def alike(stored, shown):
    """Whether two SVG have the same texts and colours, and numbers that differ by rounding only."""
    words, numbers = zip(parts_of(stored), parts_of(shown))
    return words[0] == words[1] and np.allclose(*numbers, rtol=0, atol=0.5)


def parts_of(svg):
    """The texts and colours of an SVG, and its numbers; but not the names of its parts."""
    svg = re.sub(r'\b(id|clip-path|xlink:href)="[^"]*"', "", "".join(svg))
    number = r"-?\d+(?:\.\d+)?"
    numbers = re.findall(number, re.sub("#[0-9a-f]{6}", "", svg))
    words = re.findall(">[^<]+<|#[0-9a-f]{6}", svg)
    return [words, len(numbers)], [float(each) for each in numbers]


def test_what_is_stored_is_what_the_cells_show(monkeypatch):
    """But for two rules of a table, which take long."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(LESSON.parent)
    few = {name: rule for name, rule in lossless.RULES.items() if not re.search(SLOW, name)}
    monkeypatch.setattr(lossless, "RULES", few)
    names = {}
    drawn = []
    cells = json.loads(LESSON.read_text())["cells"]
    for cell in (each for each in cells if each["cell_type"] == "code"):
        text, pictures = stored(cell)
        found, shown = run_cell(cell, names)
        assert found == re.sub(f".*({SLOW}).*\n", "", text), cell["id"]
        assert len(pictures) == len(shown), cell["id"]
        if "measured" not in cell["metadata"].get("tags", []):
            assert all(map(alike, pictures, shown)), cell["id"]
        drawn += shown
    assert len(drawn) == 8 and not alike(drawn[1], drawn[2])
    assert LESSON.stat().st_size < 300_000


def test_the_answers_are_what_the_project_does():
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 9, dtype=torch.float64, generator=generator).softmax(dim=-1)
    assert torch.equal(answers.residual(p, q), residual(p, q))
    parents = [-1, 0, 0, 1, 1, 2, 4]
    nodes = [Node(5)]
    for parent in parents[1:]:
        nodes.append(nodes[parent].child(5, estimate=1.0, exit_layer=2))
    mask = inputs([5], nodes, read=0, like=p).mask  # 0 where a row attends to a column
    assert (answers.ancestor_mask(parents) == (mask == 0).numpy()).all()
    rows = torch.randn(9, 2, generator=generator)
    kept = answers.kept_rows(rows, 3, [1, 3, 5])
    move_up(rows[None], 3, [3, 5, 7])
    assert torch.equal(kept, rows[:6])


@pytest.mark.parametrize("name", MISTAKES)
def test_right_answers_are_right_and_mistakes_are_told_by_name(name):
    assert mark(name, getattr(answers, name)) == "right!"
    sentences = [mark(name, mistake) for mistake in MISTAKES[name]]
    assert sentences == [" ".join(getdoc(mistake).split()) for mistake in MISTAKES[name]]
    assert len(set(sentences)) >= 2


def in_place(p, q):
    return p.sub_(q).clamp_(min=0.0).div_(p.sum())


TOLD = {
    "right!": ("residual", in_place),
    "should be 0.584; yours is True": ("acceptance_probability", lambda p, q, token: True),
    "returns None": ("residual", lambda p, q: None),
    "raises TypeError: 'Tensor' object is not callable": ("residual", lambda p, q: p(q)),
    "[0.6, 0.4, 0.0]) should be 1; yours is 0": ("choose_exit", lambda *numbers: 0),
    "should be [[1]]; yours is 'no mask'": ("ancestor_mask", lambda parents: "no mask"),
}


@pytest.mark.parametrize("words", TOLD)
def test_what_a_result_shows_is_told(words):
    assert words in mark(*TOLD[words])
