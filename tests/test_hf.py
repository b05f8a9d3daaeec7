"""``bench hf``: it finds nothing on models that are read rightly, and what is planted in others."""

import json
import shutil

import pytest
import torch
from helpers import WEIGHTS, change_json, program, refuses
from test_model import SIZES, VARIANTS
from theirs import random_transformers
from vocabularies import save_trained

from s2d import model
from s2d.bench import __main__ as bench
from s2d.bench import hf, peers
from s2d.checkpoint.load import load_model
from s2d.checkpoint.tokenizer_model import SentencePieceModel

HF = "hf", "--target"


@pytest.fixture(autouse=True)
def one_question(monkeypatch):
    asked = hf.corpus_questions(1, turns=1)[:1]
    monkeypatch.setattr(hf, "corpus_questions", lambda limit, turns: asked)


def check(folder, *more):
    return program(bench.main, *HF, folder, "--max-new-tokens", 4, *more)


@pytest.fixture(params=["llama3-rope", "qwen3"])
def folder(request, tmp_path):
    """A random model with a tokenizer.json, written by transformers."""
    folder = tmp_path / "base-1b"
    config = SIZES | {"vocab_size": 601} | VARIANTS[request.param]
    random_transformers(**config).save_pretrained(folder)
    return save_trained(folder)


def test_models_that_are_read_rightly(folder, capsys):
    assert check(folder) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["logits", "ar", "s2d-tree:exits=0"]
    assert all(line.endswith(": ok") for line in lines)
    assert "the tokenizer is not compared" in err
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(300)]}))
    assert check(folder) == 0


def test_a_miniature_with_its_draft_by_every_method(capsys):
    assert check("7b") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + 6
    assert check("7b", "--exits", "1,4") == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    exits = "sd:exits=1", "sd:exits=4", "mcsd:exits=4", "s2d:exits=1,4", "s2d-tree:exits=1,4"
    assert rows[-6:] == ["ar", *exits]


def test_what_transformers_does_not_read_is_one_line(tmp_path, capsys):
    folder = shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "m")
    change_json(folder / "config.json", rms_norm_eps=None)
    refuses(bench.main, capsys, "transformers does not read", *HF, folder)


def test_faults_are_found(capsys, monkeypatch):
    rotate, encode = model.rotate, SentencePieceModel.encode
    monkeypatch.setattr(model, "rotate", lambda x, cos, sin: rotate(x, cos, 0.999 * sin))
    monkeypatch.setattr(SentencePieceModel, "encode", lambda *words: encode(*words)[::-1])
    assert check("7b") == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAULT")]
    assert {"tokenizer", "logits"} <= {line.split("  ")[0] for line in faults}


def test_transformers_runs_the_layers_that_are_read():
    """Those of a draft that assists it, up to its last exit."""
    ours = load_model(WEIGHTS / "mini-draft", dtype="float64", layers=2)
    theirs = peers.as_transformers(ours, WEIGHTS / "mini-draft")
    tokens = torch.arange(3, 40)[None]
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-10)
