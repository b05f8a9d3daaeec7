"""Programs on a folder as a user brings it: of Llama 3's form, and as small as can be.

Its embedding is tied, its rope Llama 3's, the chat template its own. It has two EOS, and bfloat16
in two shards.
"""

import json
import shutil

import pytest
import torch
from helpers import WEIGHTS, change_json, program
from test_model import SIZES, VARIANTS
from theirs import random_transformers
from vocabularies import BRACKETS, save_trained

import run
from s2d import load_model
from s2d.options import METHODS
from s2d.train import __main__ as train

EOS = [1, 4]  # <|end|> and <|eot|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Written by transformers, as most are."""
    folder = tmp_path_factory.mktemp("own") / "base-tiny"
    config = SIZES | VARIANTS["llama3-rope"] | dict(vocab_size=600, tie_word_embeddings=True)
    config |= dict(bos_token_id=0, eos_token_id=EOS)
    model = random_transformers(**config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB")
    return save_trained(folder, chat_template=BRACKETS)


@pytest.fixture(scope="module")
def draft(folder):
    """Trained from it, with ``train soft``."""
    out = folder.with_name("tiny-draft")
    words = ["soft", "--init", folder, "--device", "cpu", "--out", out]
    words += "--exits 1,2 --millions 0.002 --batch 2 --micro-batch 2 --length 64".split()
    assert program(train.main, *words) == 0
    return out


def test_run_by_every_method(folder, draft, tmp_path, capsys):
    """One text, with several drafts or none, many prompts at once, as a page.

    A draft was trained, is the first layers of the target itself, or of a folder like it that says
    which exits it has, as LayerSkip's.
    """
    assert len(list(folder.glob("model-*-of-00002.safetensors"))) == 2
    shutil.copytree(folder, tmp_path / "layerskip")
    change_json(tmp_path / "layerskip/config.json", exit_layers=[1, 3])
    common = ["--target", folder, "--dtype", "float64", "--max-new-tokens", 12, "--json"]
    texts = set()
    for words in (
        *(["--draft", draft, "--method", method] for method in [*METHODS][1:]),
        ["--method", "ar"],
        ["--method", "s2d"],
        ["--draft", folder, "--exits", "1,2"],
        *(["--draft", tmp_path / "layerskip", "--method", method] for method in [*METHODS][1:]),
        ["--trace", tmp_path / "page.html"],
    ):
        assert program(run.main, *common, "--prompt", "Hi", *words) == 0
        answer = json.loads(capsys.readouterr().out)
        texts.add(answer["text"])
        if tmp_path / "layerskip" in words:
            assert answer["options"]["exits"] in ([3], [1, 3])
    (tmp_path / "prompts").write_text("Hi\nHi\n")
    assert program(run.main, *common, "--prompts", tmp_path / "prompts") == 0
    texts |= {json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()}
    assert len(texts) == 1 and (tmp_path / "page.html").is_file()


def test_exits_of_layers_that_are_not_read_are_no_exits():
    whole = load_model(WEIGHTS / "mini-draft").drafting
    assert load_model(WEIGHTS / "mini-draft", layers=3).drafting == whole
    assert load_model(WEIGHTS / "mini-draft", layers=2).drafting == {}
