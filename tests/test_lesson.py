"""The lesson: what its cells show is what is stored, and its exercises tell mistakes by name."""

import base64
import io
import json
from copy import deepcopy
from inspect import getdoc

import numpy as np
import pytest
import torch
from helpers import ROOT, random_distribution

from s2d.cache import move_up
from s2d.lesson import answers
from s2d.lesson.checks import judge
from s2d.lesson.mistakes import MISTAKES
from s2d.mask import add_nodes
from s2d.rules import residual

LESSON = ROOT / "s2d/lesson/lesson.ipynb"
STORED = json.loads(LESSON.read_text())


def code_cells(book):
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def pixels(png):
    from matplotlib.image import imread

    return imread(io.BytesIO(base64.b64decode(png)))


def alike(stored, shown):
    """Whether pictures are equal; a few pixels may differ, where a processor rounds differently."""
    stored = pixels(stored)
    shown = pixels(shown)
    if stored.shape != shown.shape:
        return False
    return (np.abs(stored - shown).max(axis=-1) > 0.2).mean() < 2e-4


def texts_of(cell):
    """What a cell shows, but for its pictures."""
    parts = []
    for output in cell["outputs"]:
        parts += output["text"] if "text" in output else output["data"]["text/plain"]
    return "".join(parts)


def pictures_of(cell):
    data = [output.get("data", {}) for output in cell["outputs"]]
    return [each["image/png"] for each in data if "image/png" in each]


def lies(stored, shown):
    """The cells of a stored notebook that show something else than when they were run."""
    return [
        "".join(cell["source"])
        for cell, other in zip(code_cells(stored), code_cells(shown))
        if not shows_the_same(cell, other)
    ]


def shows_the_same(cell, other):
    pictures = pictures_of(cell)
    others = pictures_of(other)
    if texts_of(cell) != texts_of(other) or len(pictures) != len(others):
        return False
    return "measured" in cell["metadata"].get("tags", []) or all(map(alike, pictures, others))


@pytest.fixture(scope="module")
def shown():
    """The notebook as a run by Jupyter's client shows it."""
    pytest.importorskip("matplotlib")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(LESSON, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        nbclient.NotebookClient(book, resources={"metadata": {"path": LESSON.parent}}).execute()
    return json.loads(nbformat.writes(book))


def test_what_is_stored_is_what_the_cells_show(shown):
    assert not lies(STORED, shown)
    assert LESSON.stat().st_size < 300_000


def test_planted_lies_are_found(shown):
    """In what is printed, in a picture, and by a picture that is missing."""
    book = deepcopy(shown)
    drawing = [cell for cell in code_cells(book) if pictures_of(cell)]
    printed, drawn, missing = drawing[1:4]
    printed["outputs"][0]["text"] = "the same text: False\n"
    drawn["outputs"][-1]["data"]["image/png"] = pictures_of(missing)[0]
    missing["outputs"].pop()
    assert lies(book, shown) == ["".join(cell["source"]) for cell in (printed, drawn, missing)]


def test_the_answers_are_what_the_project_does():
    generator = torch.Generator().manual_seed(1)
    p, q = random_distribution(generator, 9), random_distribution(generator, 9)
    assert torch.equal(answers.residual(p, q), residual(p, q))
    ancestors = np.ones((1, 1), dtype=bool)
    for level in ([0, 0], [1, 1, 2], [4]):
        ancestors = add_nodes(ancestors, level)
    assert (answers.ancestor_mask([-1, 0, 0, 1, 1, 2, 4]) == ancestors).all()
    rows = torch.randn(9, 2, generator=generator)
    kept = answers.kept_rows(rows, 3, [0, 2, 4])
    move_up(rows[None], 3, [3, 5, 7])
    assert torch.equal(kept, rows[:6])


@pytest.mark.parametrize("answer", MISTAKES, ids=lambda answer: answer.__name__)
def test_right_answers_are_right_and_mistakes_are_told_by_name(answer):
    name = answer.__name__
    assert judge(name, answer) == "right!"
    sentences = {judge(name, mistake) for mistake in MISTAKES[answer]}
    assert sentences == {" ".join(getdoc(mistake).split()) for mistake in MISTAKES[answer]}
    assert len(sentences) == len(MISTAKES[answer]) >= 2


@pytest.mark.parametrize("found", [None, "a", np.array(["a"]), {}, torch.ones(2), 10**400])
def test_whatever_a_function_returns_is_judged(found):
    for answer in MISTAKES:
        judged = judge(answer.__name__, lambda *arguments: found)
        assert f"yours is {found!r}" in judged or "yours is [1.0, 1.0]" in judged
    p = torch.ones(3).requires_grad_()
    assert judge("residual", lambda *pair: answers.residual(*pair) * p[0]) == "right!"
