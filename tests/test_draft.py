"""The sorted draft: after any history every exit predicts what a cache-free pass predicts."""

import random
from collections import Counter

import pytest
import torch
from definition import logits_after
from helpers import nearly_equal, random_tokens

from s2d import LayerExit, SortedDraft, generate, model, start
from s2d.tree import GrowingShape


@pytest.mark.parametrize("exits", [(4,), (1, 2, 4)])
@pytest.mark.parametrize("shape", [(1,) * 9, (3, 2, 1), GrowingShape(4, 3, 4)])
def test_every_exit_equals_a_cache_free_forward(exits, shape, monkeypatch):
    """In texts whose trees are accepted in part; also if it lags behind, or is asked alone."""
    rng = random.Random(0)
    lags = []

    class AnyExit(SortedDraft):
        def choose_exit(self, tree, nodes, rule):
            return self.ask(rng.choice(self.exits), tree, nodes, rule)

    predict = LayerExit.predict

    def predict_and_check(self, tree, nodes):
        lags.append(len(tree.context) - (self.cache.length or 999))
        found = predict(self, tree, nodes)
        texts = [tree.text(node) for node in nodes]
        expected = torch.stack([logits_after(same, text, self.exit_layer) for text in texts])
        assert (found.logits - expected).abs().max() < 1e-10
        assert abs(found.confidence - expected.softmax(dim=-1).max()) < 1e-10
        return found

    monkeypatch.setattr(LayerExit, "predict", predict_and_check)
    monkeypatch.setattr("s2d.mask.MAX_PROMPT", 1)
    target, draft = nearly_equal(2, eos_token_ids=())
    _, same = nearly_equal(2, eos_token_ids=())
    options = dict(exits=exits, thresholds=(0.4, 0.5)[: len(exits) - 1], tree=shape)
    for seed, length in enumerate((1, 40, 40)):
        options["drafter"] = AnyExit if seed == 2 else None
        options |= dict(temperature=1.0, seed=seed, max_new_tokens=12)
        generate(target, random_tokens(seed, length), draft, **options)
    assert len(exits) == 1 or max(lags) > 2  # read one by one


def test_no_layers_run_behind_the_exit_that_drafts():
    target, draft = nearly_equal(8)
    runs = []
    left = set()
    for number, block in enumerate(draft.model.layers, 1):
        block.register_forward_hook(lambda *_, number=number: runs.append(number))
    options = dict(exits=(1, 2, 3, 4), thresholds=(0.35, 0.35, 0.35), draft_length=1)
    for seed in range(20):
        runs.clear()
        step = next(iter(start(target, random_tokens(seed, 12), draft, **options)))
        _, drafted = step.tree.nodes
        assert runs == list(range(1, drafted.exit_layer + 1))
        left.add(drafted.exit_layer)
    assert len(left) > 2


LONG = {(299, 299, "causal"): 8, (1, 300, "causal"): 4, (3, 302, "mask"): 4}
SHORT = {(9, 9, "causal"): 4, (11, 11, "mask"): 4}


@pytest.mark.parametrize(("length", "expected"), [(300, LONG), (9, SHORT)])
def test_a_long_prompt_is_read_in_one_causal_pass(length, expected, monkeypatch):
    """By all 4 layers of the target and of a draft with 3 exits; a short one with the tree."""
    passes = Counter()  # queries, keys, and whether there is a mask, of each layer
    attention = model.attention

    def watched(q, k, v, mask):
        passes[q.shape[2], k.shape[2], "causal" if mask is None else "mask"] += 1
        return attention(q, k, v, mask)

    monkeypatch.setattr(model, "attention", watched)
    target, draft = nearly_equal(0, max_position_embeddings=400)
    options = dict(exits=(1, 2, 4), thresholds=(9, 9), tree=(2,))
    next(iter(start(target, random_tokens(0, length), draft, **options)))
    assert passes == expected
