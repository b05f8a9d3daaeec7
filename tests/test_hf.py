"""``bench hf``: it finds nothing on models that are read rightly, and what is planted in others."""

import json

import pytest
from helpers import change_json, program, refuses
from test_model import SIZES, VARIANTS
from theirs import random_transformers
from vocabularies import save_trained

from s2d import model
from s2d.bench import __main__ as bench

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
HF = "hf", "--target"


def check(folder, *more):
    return program(bench.main, *HF, folder, "--max-new-tokens", 8, *more)


@pytest.fixture(params=["wide-heads", "llama3-rope", "qwen2", "qwen3"])
def folder(request, tmp_path):
    """A random model with a tokenizer.json and a chat template, written by transformers."""
    folder = tmp_path / "base-1b"
    config = SIZES | {"vocab_size": 601} | VARIANTS[request.param]
    random_transformers(**config).save_pretrained(folder)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    if request.param.startswith("qwen"):
        save_trained(folder, like="qwen")
        names |= {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|eot|>"}
    else:
        save_trained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_models_that_are_read_rightly(folder, capsys):
    assert check(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["tokenizer", "chat template", "logits"]
    assert all(line.endswith(": ok") for line in lines) and len(lines) == 5
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(300)]}))
    assert check(folder) == 0


def test_a_miniature_with_its_draft_by_every_method(capsys):
    assert check("7b") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 6
    assert check("7b", "--exits", "1,4") == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    exits = "sd:exits=1", "sd:exits=4", "mcsd:exits=4", "s2d:exits=1,4", "s2d-tree:exits=1,4"
    assert rows[-6:] == ["ar", *exits]


def test_what_transformers_does_not_read_is_one_line(folder, capsys):
    change_json(folder / "config.json", rms_norm_eps=None)
    refuses(bench.main, capsys, "transformers does not read", *HF, folder)


def test_faults_are_found(folder, capsys, monkeypatch):
    rotate = model.rotate
    monkeypatch.setattr(model, "rotate", lambda x, cos, sin: rotate(x, cos, 0.999 * sin))
    monkeypatch.setattr("s2d.checkpoint.chat.render_template", lambda *arguments: "x")
    assert check(folder) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAULT")]
    assert {"chat template", "logits"} <= {line.split("  ")[0] for line in faults}
