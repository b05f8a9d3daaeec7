"""A real language model, as README tells a user to get it, and as transformers reads the same."""

import pytest
from helpers import WEIGHTS
from theirs import greedy_tokens

from s2d import Tokenizer, generate, load_model

FOLDER = WEIGHTS / "smollm2-135m"
DRAFTING = dict(exits=(6, 9, 12), thresholds=(0.3, 0.3), draft_length=4, tree=(3, 3, 10))


@pytest.mark.skipif(not FOLDER.is_dir(), reason="python tests/smollm2.py writes it")
def test_greedy_tokens_equal_transformers():
    """In float64, with its own first layers as a draft."""
    target = load_model(FOLDER, dtype="float64")
    target.drafting = DRAFTING
    prompt = Tokenizer(FOLDER).encode_chat(["Why is the sky blue?"])
    found = generate(target, prompt, target, method="s2d-tree", max_new_tokens=6)
    assert found.tokens == greedy_tokens(FOLDER, prompt, count=6)
    assert found.exact and len(found.stats.sent) > 1
