"""Target-initialised roots, as published: against slow versions without caches or trees."""

import pytest
import torch
from definition import logits_after
from helpers import nearly_equal, random_llama

from s2d import generate
from s2d.mcsd.roots import RootsDecoder
from s2d.tree import GrowingShape

OPTIONS = dict(eos_token_ids=(), scale=0.12, num_hidden_layers=2)


def best(model, tokens, count):
    return logits_after(model, tokens).topk(count).indices.tolist()


def slow_chains(target, draft, prompt, widths, count):
    """Greedy decoding with one exit: a chain below each root."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        survivors = []
        for root in best(target, tokens, widths[0]):
            chain, alive = [root], True
            while alive and len(chain) < len(widths):
                drafted = best(draft, tokens + chain, 1)
                alive = drafted == best(target, tokens + chain, 1)
                chain += drafted * alive
            survivors.append(chain)
        tokens += max(survivors, key=len)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("widths", [(3, 1, 1, 1), (5, 1)])
def test_chains_below_roots_as_published(widths):
    """Each root counts as accepted and the longest chain wins: not what the target alone writes."""
    different = 0
    for seed in range(2):
        target, draft = nearly_equal(seed, **OPTIONS | {"scale": 0.1})
        expected = slow_chains(target, draft, [3, 1, 4], widths, 15)

        answers = []
        for options in (
            dict(tree=widths, rule="rejection"),
            dict(tree=(1, *widths), rule="rejection"),
            dict(draft_length=6),
            dict(tree=widths),
            dict(tree=GrowingShape(3, 4, 12)),
        ):
            options |= dict(max_new_tokens=20, decoder=RootsDecoder)
            answers.append(generate(target, [3, 1, 4], draft, **options))
        lossy, *others = answers
        assert lossy.tokens[:15] == expected[:15] and not lossy.exact
        alone = generate(target, [3, 1, 4], method="ar", max_new_tokens=20).tokens
        assert all(each.exact and each.tokens == alone for each in others)
        different += lossy.tokens != alone
    assert different


@pytest.mark.parametrize("kept", [dict(top_p=0.3), dict(top_k=2)])
def test_roots_keep_to_top_p_and_top_k(kept):
    """Where they leave fewer tokens than there are roots, none from outside may be emitted."""
    target, draft = random_llama(1, eos_token_ids=()), random_llama(2)
    options = dict(tree=(4, 1, 1), decoder=RootsDecoder, rule="rejection", temperature=1.0)
    for seed in range(5):
        output = generate(target, [3, 1, 4], draft, seed=seed, max_new_tokens=20, **options, **kept)
        tokens = torch.tensor([3, 1, 4] + output.tokens, device=target.device)
        probs = torch.softmax(target(tokens[None])[0, 2:-1], dim=-1)  # (20, V)
        each = probs.gather(1, tokens[3:, None])
        better = probs.where(probs > each, 0.0)
        assert (better.sum(dim=-1) < kept.get("top_p", 1.0)).all()
        assert (better.count_nonzero(dim=-1) < kept.get("top_k", 61)).all()
