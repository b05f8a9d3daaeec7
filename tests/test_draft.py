"""The sorted draft's caches: whatever happened before, every exit predicts what a cache-free forward predicts."""

import random

import pytest
import torch
from helpers import random_llama

from s2d.draft import SortedDraft
from s2d.sampling import Sampler

CAPACITY = 100


def cache_free_logits(model, tokens, exit_layer):
    return model.logits(model.run_layers(model.embed(tokens), 0, exit_layer))[0, -1]


def force_exit(drafter, index):
    """Thresholds that no, or every, confidence exceeds: the next prediction leaves at segment ``index``."""
    for number, segment in enumerate(drafter.segments):
        segment.threshold = 0.0 if number >= index else 1.0


@pytest.mark.parametrize("exits", [(4,), (2, 4), (1, 2, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("seed", range(8))
def test_every_exit_equals_a_cache_free_forward(exits, seed):
    """Random histories of exits, run lengths and roll-backs."""
    rng, model = random.Random(f"{exits} {seed}"), random_llama(seed)
    drafter = SortedDraft(model, exits, [0.0] * len(exits), CAPACITY)
    tokens = torch.randint(0, 61, (1, CAPACITY), generator=torch.Generator().manual_seed(seed))
    n, deepest = rng.randrange(1, 20), 0
    for _ in range(40):
        wanted = rng.randrange(len(exits))
        force_exit(drafter, wanted)
        logits, confidence, exit_layer = drafter.predict(tokens[:, :n])
        expected = cache_free_logits(model, tokens[:, :n], exits[wanted])
        assert exit_layer == exits[wanted]
        assert (logits - expected).abs().max() < 1e-10
        assert abs(confidence - expected.softmax(-1).max()) < 1e-10
        deepest = max(deepest, n - drafter.segments[-1].cache.length)
        if rng.random() < 0.3:  # a rejection: other tokens follow a shorter context
            n -= rng.randrange(min(n, 12))
            drafter.truncate(n - 1)
            tokens[:, n - 1 :] = torch.randint(0, 61, (CAPACITY - n + 1,))
        else:
            n = min(CAPACITY, n + rng.choice([1, 1, 1, 2, 5]))
    assert len(exits) == 1 or deepest > 1  # the history did need catching up


def test_thresholds_choose_the_shallowest_exit_that_is_sure_enough():
    model, exits = random_llama(8), (1, 2, 3, 4)
    for seed in range(20):
        tokens = torch.randint(0, 61, (1, 12), generator=torch.Generator().manual_seed(seed))
        sure = [cache_free_logits(model, tokens, e).softmax(-1).max().item() for e in exits]
        for thresholds in ([0.3, 0.3, 0.3, 0.0], [0.9, 0.4, 0.2, 0.0], [0.2, 0.6, 1.0, 0.0]):
            _, _, left_at = SortedDraft(model, exits, thresholds, 20).predict(tokens)
            assert left_at == next(e for e, c, t in zip(exits, sure, thresholds) if c > t or e == exits[-1])


def test_a_shallow_exit_runs_no_deeper_layer():
    model = random_llama(9)
    calls = []
    for number, block in enumerate(model.model["layers"]):
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
    drafter = SortedDraft(model, (1, 3), [0.0, 0.0], 20)
    drafter.predict(torch.zeros(1, 5, dtype=torch.long))
    assert calls == [0]


def test_chain_keeps_the_distributions_its_tokens_were_drawn_from():
    model = random_llama(10)
    context = torch.zeros(1, 40, dtype=torch.long)
    context[0, :4] = torch.tensor([5, 9, 1, 7])
    drafter = SortedDraft(model, (2, 4), [0.4, 0.0], 40)
    chain = drafter.grow_chain(context, 4, 6, 0.7, 0.9, Sampler(0, "cpu"))
    assert torch.equal(context[0, 4:10], chain.tokens)
    assert len(chain.exits) == 6
    for i, exit_layer in enumerate(chain.exits):
        raw = torch.softmax(cache_free_logits(model, context[:, : 4 + i], exit_layer) / 0.7, dim=-1)
        kept = chain.probs[i] > 0
        assert chain.tokens[i] in kept.nonzero()
        assert raw[kept].sum() >= 0.9 > raw[kept].sum() - raw[kept].min()
        assert (chain.probs[i] - raw * kept / raw[kept].sum()).abs().max() < 1e-12


def test_stop_ends_the_chain_where_the_last_exit_is_unsure():
    model = random_llama(11)
    context = torch.zeros(1, 60, dtype=torch.long)
    context[0, :3] = torch.tensor([3, 1, 4])
    free = SortedDraft(model, (2, 4), [0.6, 0.0], 60).grow_chain(context.clone(), 3, 20, 0.0, 1.0, None)
    filled = context.clone()
    filled[0, 3:23] = free.tokens
    doubts = [
        cache_free_logits(model, filled[:, : 3 + i], 4).softmax(-1).max().item() if exit_layer == 4 else 1.0
        for i, exit_layer in enumerate(free.exits)
    ]
    stop = min(doubts) + 1e-6
    expected = next(i for i, doubt in enumerate(doubts) if doubt < stop)
    assert 0 < expected < 20
    stopped = SortedDraft(model, (2, 4), [0.6, 0.0], 60).grow_chain(context.clone(), 3, 20, 0.0, 1.0, None, stop)
    assert len(stopped.exits) == expected
    assert stopped.tokens.tolist() == free.tokens[:expected].tolist()
