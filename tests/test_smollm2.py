"""A real language model, as README tells a user to get it, and as transformers reads the same."""

from copy import copy
from dataclasses import replace

import pytest
from helpers import WEIGHTS
from theirs import greedy_tokens

import run
from s2d import Tokenizer, generate, load_model
from s2d.model import Drafting

NAME = "smollm2-135m"
DRAFTING = Drafting((6, 9, 12), (0.3, 0.3, 0.0), length=4, tree=(3, 3, 10))


@pytest.fixture(scope="module")
def folder():
    if not (WEIGHTS / NAME).is_dir():
        pytest.skip("python tests/smollm2.py writes weights/smollm2-135m")
    return WEIGHTS / NAME


def test_greedy_tokens_equal_transformers(folder):
    """In float64, with its own first layers as a draft."""
    target = load_model(folder, dtype="float64")
    draft = copy(target)
    draft.config = replace(target.config, drafting=DRAFTING)
    prompt = Tokenizer(folder).encode_chat(["Why is the sky blue?"])
    expected = greedy_tokens(folder, prompt, count=8)
    for method in ("s2d", "s2d-tree"):
        output = generate(target, prompt, draft, method, max_new_tokens=8)
        assert output.tokens == expected and output.exact and len(output.stats.exit_counts) > 1


def test_run_drafts_from_the_shipped_datastore_and_says_what_it_gained(folder, capsys):
    assert run.main(["--target", NAME, "--max-new-tokens", "16"]) == 0
    out, error = capsys.readouterr()
    assert f"the text and of {WEIGHTS / NAME}-datastore.safetensors" in error
    assert "exits          exit 0: asked" in error
    assert "sky" in out and "s2d-tree, growing trees 3x5x5, lossless" in error
    assert "times as fast as the target alone" in error
