"""A real language model, as README tells a user to get it, and as transformers reads the same."""

import pytest
import torch
from helpers import WEIGHTS, emitted_logits
from theirs import load_transformers

from s2d import Tokenizer, generate, load_model, start
from s2d.passes.bitwise import BitwiseDecoder

FOLDER = WEIGHTS / "smollm2-135m"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="python tests/smollm2.py writes it")
DRAFTING = dict(exits=(6, 9, 12), thresholds=(0.3, 0.3), draft_length=4, growing=(3, 3, 10))


def test_greedy_tokens_equal_transformers():
    """In float64, with its own first layers as a draft."""
    target = load_model(FOLDER, dtype="float64")
    target.drafting = DRAFTING
    prompt = Tokenizer(FOLDER).encode_chat(["Why is the sky blue?"])
    found = generate(target, prompt, target, method="s2d-tree", max_new_tokens=4)
    theirs = load_transformers(FOLDER, torch.float64)
    text = theirs.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    assert prompt + found.tokens == text[0].tolist()
    assert found.exact and len(found.stats.sent) > 1


def test_in_bfloat16_drafting_changes_no_bit():
    """Exit 0 drafts from a prompt that repeats itself."""
    target = load_model(FOLDER, dtype="bfloat16")
    prompt = Tokenizer(FOLDER).encode("a b c d, a b c d, a b")
    found = []
    for options in (dict(method="ar"), dict(method="s2d", exits=[0])):
        decoder = start(target, prompt, max_new_tokens=4, decoder=BitwiseDecoder, **options)
        found.append([emitted_logits(decoder), torch.tensor(decoder.tokens)])
    assert all(map(torch.equal, *found))
    assert decoder.stats.accepted.total() > 0
