"""What a step costs besides the target's forward pass."""

import statistics
import time

import pytest
import torch
from helpers import WEIGHTS, Operations

from s2d import Tokenizer, generate, load_model
from s2d.ngram.datastore import Datastore, reading

PROMPT = "What do people in Tadastan eat, and where is it?"


def test_all_but_the_forwards_takes_less_than_15_percent_of_a_step():
    """The median of five runs: a busy machine slows all parts alike.

    Exit 0 drafts trees of 16 nodes from a datastore that is the target's own text.
    """
    target, tokenizer = load_model(WEIGHTS / "mini-70b"), Tokenizer(WEIGHTS / "mini-70b")
    prompt = tokenizer.encode_chat([PROMPT])
    forwards = []
    text = prompt + generate(target, prompt, method="ar", max_new_tokens=64).tokens
    embed, head = target.model.embed_tokens, target.lm_head  # a pass begins and ends there
    embed.register_forward_pre_hook(lambda *_: forwards.append(-time.perf_counter()))
    head.register_forward_hook(lambda *_: forwards.append(time.perf_counter()))
    options = dict(exits=[reading(Datastore(text, end=[]))], tree=(4, 1, 1, 1), stop=0.0)
    options |= dict(max_new_tokens=len(text) - len(prompt))
    shares = []
    for _ in range(5):
        forwards.clear()
        stats = generate(target, prompt, method="mcsd", **options).stats
        assert set(stats.accept_lengths[:-1]) == {5}  # all that is drafted, and the bonus token
        shares.append(1.0 - sum(forwards) / stats.seconds)
    assert statistics.median(shares) < 0.15


@pytest.mark.parametrize("name, most", [("mini-7b", 20), ("mini-70b", 22)])
def test_a_pass_has_few_operations(name, most):
    """A block's for 8 rows after a text. Where heads are grouped, two more copy them."""
    model = load_model(WEIGHTS / name, quick=False)
    counts = []
    for layers in (1, 2):
        cache = model.new_cache(0, layers)
        with torch.inference_mode():
            hidden = model.embed(torch.ones(1, 20, dtype=torch.long))
            model.run_layers(hidden, 0, layers, cache=cache)
            with Operations() as counted:
                model.run_layers(hidden[:, :8], 0, layers, cache=cache)
        counts.append(counted.count)
    assert counts[1] - counts[0] <= most
