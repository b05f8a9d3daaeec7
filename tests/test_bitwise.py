"""Passes of one size: tokens and logits are those of plain decoding, bit for bit."""

import pytest
import torch
from helpers import WEIGHTS, emitted_logits, raises_line, random_tokens

from s2d import GrowingShape, generate, generate_many, load_model, start
from s2d.model import KVCache
from s2d.passes.bitwise import BitwiseDecoder, PaddedCache

LENGTHS = {"bfloat16": (1, 30), "float32": (1, 501)}  # of prompts; bfloat16 may be emulated
WAYS = dict(method="s2d"), dict(method="sd", draft_length=15), dict(exits=[0], draft_length=7)


def written(*models, **options):
    """The tokens of an answer, why it ended, and the target's logits before each token."""
    decoder = start(*models, decoder=BitwiseDecoder, max_new_tokens=7, **options)
    rows = emitted_logits(decoder)
    return decoder.tokens, decoder.ended, rows


def differing(name, dtype, prompts):
    """How many answers are not those of plain decoding, in a token or in a bit of a logit."""
    target = load_model(WEIGHTS / name, dtype=dtype)
    draft = load_model(WEIGHTS / "mini-draft", dtype=dtype)
    found = 0
    for case, prompt in enumerate(prompts):
        law = dict(temperature=case % 2, seed=case, top_p=0.9)
        tokens, ended, logits = written(target, prompt, method="ar", **law)
        for way in WAYS:
            rule = "noise" if law["temperature"] else "rejection"
            own, own_end, rows = written(target, prompt, draft, rule=rule, **way, **law)
            found += (own, own_end) != (tokens, ended) or not torch.equal(rows, logits)
    return found


@pytest.mark.parametrize("dtype", LENGTHS)
def test_whatever_drafts_the_bits_are_those_of_plain_decoding(dtype):
    """After short and long prompts, and where the context ends."""
    prompts = [random_tokens(length, length, vocab=1000) for length in LENGTHS[dtype]]
    assert differing("mini-70b", dtype, prompts) == 0


@pytest.mark.parametrize("dtype", LENGTHS)
def test_keys_are_padded_for_a_reason(dtype, monkeypatch):
    """Nobody should simplify it away: the last, partial vector of keys is summed otherwise."""

    def extend(self, T):
        KVCache.extend(self, T)
        self.end = self.length

    def to_the_last_key(self, layer, q, k, v, mask):
        return KVCache.attend(self, layer, q, k, v, None if mask is None else mask[:, : self.end])

    monkeypatch.setattr(PaddedCache, "extend", extend)
    monkeypatch.setattr(PaddedCache, "attend", to_the_last_key)
    if not differing("mini-70b", dtype, [random_tokens(0, 20, vocab=1000)]):
        pytest.skip("this processor sums a partial vector of keys as a whole one")


class ForkBelow:
    """A chain by its first level alone."""

    depth, prunes = 3, False
    frontier = sent = staticmethod(lambda nodes: nodes)
    width = staticmethod(lambda node: 1 + node.depth)


def test_what_does_not_go_together_is_one_line():
    target = load_model(WEIGHTS / "mini-7b")
    draft = load_model(WEIGHTS / "mini-draft")
    trees = (2, 1), GrowingShape(2, 2, 3), ForkBelow()
    for shape in (dict(draft_length=16), *(dict(tree=tree, stop=0.0) for tree in trees)):
        options = dict(decoder=BitwiseDecoder, **shape)
        words = "bitwise: expected a chain of up to 15 tokens"
        raises_line(generate, ValueError, words, target, [3, 1], draft, **options)
    answers = generate_many(target, [[3, 1]], draft, decoder=BitwiseDecoder)
    raises_line(next, ValueError, "its own pass", answers)
