"""Drafts that are the first layers of a published model, as LayerSkip's, or of the target itself.

Such a folder is a plain Llama's: a tokenizer without a chat template, a config.json that names no
exits, and more layers than a draft needs.
"""

import json
import shutil

import pytest
import torch
from helpers import WEIGHTS, change_json, program, random_llama
from safetensors.torch import load_file, save_file

import run
from s2d import load_model
from s2d.bench.methods import choose_methods, load_methods
from s2d.checkpoint import save_model
from s2d.options import METHODS

EXITS = (1, 2, 4)
PROMPT = ["--prompt", "The capital of Tadastan is", "--max-new-tokens", 24]


def save_plain(folder, layers, **sizes):
    """A random model of such a form, whose exits often agree, as upper layers change little."""
    model = random_llama(0, num_hidden_layers=layers, vocab_size=1024, **sizes)
    for block in model.model.layers[1:]:
        block.self_attn.o_proj.weight *= 0.1
        block.mlp.down_proj.weight *= 0.1
    save_model(model, folder, dtype=torch.float32)
    shutil.copy(WEIGHTS / "mini-7b/tokenizer.model", folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("plain") / "layerskip-tiny", layers=6)


@pytest.fixture(scope="module")
def cut(whole):
    """The same without the layers after the last exit; its config.json still asks for them."""
    folder = whole.with_name("layerskip-cut")
    shutil.copytree(whole, folder)
    upper = tuple(f"model.layers.{layer}." for layer in range(EXITS[-1], 6))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.startswith(upper)}
    assert len(kept) == len(tensors) - 2 * 9
    save_file(kept, folder / "model.safetensors")
    return folder


def answer(capsys, target, *words):
    common = ["--target", target, "--dtype", "float64", "--json", *PROMPT]
    assert program(run.main, *common, *words) == 0
    return json.loads(capsys.readouterr().out)


def test_texts_are_the_targets_own(whole, cut, capsys):
    """Drafted by the first layers of another folder, and by the target's own."""
    sampled = ["--temperature", 1]
    alone = answer(capsys, whole, *sampled, "--method", "ar")["tokens"]
    for draft, method in zip((cut, whole, cut, whole), METHODS[1:], strict=True):
        exits = "4" if method in ("sd", "mcsd") else "1,2,4"
        drafts = ["--draft", draft, "--exits", exits, "--method", method]
        found = answer(capsys, whole, *sampled, *drafts)
        assert found["tokens"] == alone
        assert found["stats"]["mean_accepted_tokens"] > 1.2


def test_exits_of_layers_that_are_not_read_are_no_exits():
    whole = load_model(WEIGHTS / "mini-draft").config.drafting
    assert load_model(WEIGHTS / "mini-draft", layers=3).config.drafting == whole
    assert whole.exits == (2, 3)
    assert load_model(WEIGHTS / "mini-draft", layers=2).config.drafting is None


def test_a_target_drafts_for_itself_up_to_the_exits_of_its_config(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "own")
    change_json(tmp_path / "own/config.json", exit_layers=[2, 4])
    found = answer(capsys, tmp_path / "own", "--draft", tmp_path / "own")
    assert found["options"]["exits"] == [2, 4]


def test_the_benchmark_reads_a_draft_once_up_to_its_last_exit(whole, cut):
    """And each model once. A target that drafts for itself is the target."""
    methods = {"2": "sd:exits=2", "1, 4": "s2d:exits=1,4", "itself": f"sd:exits=3:draft={whole}"}
    models = load_methods(choose_methods(whole, methods, cut), "cpu", "float64")
    assert models["ar"].draft is None and models["2"].draft is models["1, 4"].draft
    assert len(models["2"].draft.model.layers) == 4
    itself = models["itself"]
    assert itself.draft is itself.target is models["ar"].target
