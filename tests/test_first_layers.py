"""Drafts that are the first layers of a published model, as LayerSkip's, or of the target itself.

Such a folder is a plain Llama's: a tokenizer without a chat template, a config.json that names no
exits, and more layers than a draft needs.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, WEIGHTS, change_json, program, random_llama, refuses
from safetensors.torch import load_file, save_file

import run
from s2d import find_draft, generate, load_model
from s2d.bench import __main__ as bench
from s2d.bench.comparison import choose_methods, load_methods
from s2d.bench.methods import parse_method
from s2d.checkpoint import save_model
from s2d.checkpoint.load import cut_drafting
from s2d.options import METHODS
from s2d.train import __main__ as train

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


@pytest.mark.parametrize("temperature", [0, 1])
def test_texts_are_the_targets_own(whole, cut, temperature, capsys):
    """Drafted by the first layers of another folder, and by the target's own."""
    sampled = ["--temperature", temperature]
    alone = answer(capsys, whole, *sampled, "--method", "ar")["tokens"]
    for draft, method in zip((cut, whole, cut, whole), METHODS[1:], strict=True):
        exits = "4" if method in ("sd", "mcsd") else "1,2,4"
        drafts = ["--draft", draft, "--exits", exits, "--method", method]
        found = answer(capsys, whole, *sampled, *drafts)
        assert found["tokens"] == alone
        assert found["stats"]["mean_accepted_tokens"] > 1.2
    (whole.parent / "prompts").write_text("The capital of Tadastan is\n")
    words = ["--target", whole, "--draft", whole, "--exits", "1,2", "--dtype", "float64", "--json"]
    words += ["--max-new-tokens", 24, "--prompts", whole.parent / "prompts"]
    assert program(run.main, *words, *sampled) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == alone


def test_from_python(whole, cut):
    target = load_model(whole, dtype="float64")
    draft = load_model(cut, dtype="float64", layers=4)
    prompt = [1, 5, 6]
    alone = generate(target, prompt, method="ar", max_new_tokens=24)
    for drafter in (draft, target):
        for method in METHODS[1:]:
            exits = EXITS[-1:] if method in ("sd", "mcsd") else EXITS
            found = generate(target, prompt, drafter, method, exits=exits, max_new_tokens=24)
            assert found.tokens == alone.tokens and found.stats.mean_accepted_tokens > 1.2


def test_layers_that_are_read_draft_as_the_whole_model_does():
    """With the thresholds, the length and the shape that config.json has."""
    whole = load_model(WEIGHTS / "mini-draft").config.drafting
    cut = load_model(WEIGHTS / "mini-draft", layers=3).config.drafting
    assert cut.exits == (2, 3) and cut.thresholds == (whole.thresholds[0], 0.0)
    assert (cut.length, cut.stop, cut.tree) == (whole.length, whole.stop, whole.tree)
    assert cut_drafting(whole, 4) == whole and cut_drafting(cut, 4) == cut
    assert cut_drafting(whole, 1).exits == (1,)


def test_a_target_is_not_its_own_draft_with_all_of_its_layers(whole, tmp_path, capsys):
    """Unless that is asked for, or its config.json says where it may predict."""
    message = "would draft for itself with all of its 6 layers; say after which of them"
    link = tmp_path / "link"
    link.symlink_to(whole)
    refuses(run.main, capsys, message, "--target", whole, "--draft", link, *PROMPT)
    words = ["--draft", whole, "--methods", "s2d", "--limit", 1]
    refuses(bench.main, capsys, message, "--targets", whole, *words)
    refuses(bench.main, capsys, message, "hf", "--target", whole, "--draft", whole)
    words = ["--target", whole, "--draft", link, "--out", tmp_path / "d.safetensors"]
    refuses(train.main, capsys, message, "decision", *words)
    assert find_draft(whole, link, exits=[6]).draft == link
    shutil.copytree(whole, tmp_path / "own")
    change_json(tmp_path / "own/config.json", exit_layers=[2, 4])
    found = answer(capsys, tmp_path / "own", "--draft", tmp_path / "own")
    assert found["options"]["exits"] == [2, 4]


def test_the_benchmark_reads_a_draft_once_up_to_its_last_exit(whole, cut):
    methods = {"ar": parse_method("ar", None)}
    for name in ("sd:exits=2", "s2d:exits=1,4", f"sd:exits=3:draft={whole}"):
        methods[name] = parse_method(name, cut)
    models = load_methods(choose_methods(whole, methods), "cpu", "float64")
    assert models["sd:exits=2"].draft is models["s2d:exits=1,4"].draft
    assert len(models["sd:exits=2"].draft.model.layers) == 4
    itself = models[f"sd:exits=3:draft={whole}"]
    assert itself.draft is itself.target is models["ar"].target


LOAD = """
import re, sys
from pathlib import Path
import run

def measure(line):
    before = memory()
    args = run.parse(line.split())
    models = run.load(args)
    return memory() - before

def memory():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

for line in sys.stdin.read().splitlines():
    print(measure(line))
"""


def test_one_model_is_in_memory(tmp_path):
    """That of the target: a draft is its own layers, or the two that are read of another folder."""
    folder = save_plain(
        tmp_path / "large", layers=8, hidden_size=512, intermediate_size=1536, head_dim=128
    )
    shutil.copytree(folder, tmp_path / "other")
    megabytes = 2 * (folder / "model.safetensors").stat().st_size / 2**20  # in float64
    lines = ["--target 7b"]  # imports what every load needs
    for draft in (folder, tmp_path / "other"):
        lines.append(f"--target {folder} --draft {draft} --exits 1,2 --dtype float64")
    command = [sys.executable, "-c", LOAD]
    own = os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000"}  # what is freed is given back at once
    done = subprocess.run(
        command, cwd=ROOT, env=own, input="\n".join(lines), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    _, itself, other = map(float, done.stdout.splitlines())
    assert megabytes > 150
    assert 0.9 * megabytes < itself < 1.1 * megabytes
    assert 1.1 * megabytes < other < 1.4 * megabytes
