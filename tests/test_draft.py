"""The sorted draft: after any history every exit predicts what a cache-free pass predicts."""

import random

import pytest
import torch
from helpers import nearly_equal, random_tokens

from s2d import generate, start
from s2d.draft import LayerExit, SortedDraft
from s2d.tree import GrowingShape


def cache_free_logits(model, tokens, layer):
    """What follows ``tokens``, a list, after ``layer`` layers: (V,)."""
    hidden = model.embed(torch.tensor([tokens], device=model.device))
    return model.logits(model.run_layers(hidden, 0, layer))[0, -1]


@pytest.mark.parametrize("exits", [(4,), (1, 2, 4)])
@pytest.mark.parametrize("shape", [(1,) * 9, (3, 2, 1), GrowingShape(4, 3, 4)])
def test_every_exit_equals_a_cache_free_forward(exits, shape, monkeypatch):
    """In texts whose trees are accepted in part; also if it lags behind, or is asked alone."""
    rng = random.Random(0)

    def any_exit(self, tree, nodes):
        exit_ = rng.choice(self.exits)
        return exit_, exit_.predict(tree, nodes)

    lagging, predict = 0, LayerExit.predict

    def predict_and_check(self, tree, nodes):
        nonlocal lagging
        unread = len(tree.context) - 1 + len([*tree.expanded, *nodes]) - self.cache.length
        lagging += unread > len(nodes) + 8
        found = predict(self, tree, nodes)
        paths = [[*tree.context, *tree.path(node)] for node in nodes]
        expected = [cache_free_logits(same, path, self.exit_layer) for path in paths]
        expected = torch.stack(expected)
        assert (found.logits - expected).abs().max() < 1e-10
        surest = expected.softmax(dim=-1).max().item()
        assert found.confidence == pytest.approx(surest, abs=1e-10)
        return found

    monkeypatch.setattr(LayerExit, "predict", predict_and_check)
    monkeypatch.setattr("s2d.draft.MAX_UNREAD", 8)
    target, draft = nearly_equal(2, eos_token_ids=())
    _, same = nearly_equal(2, eos_token_ids=())
    rows = []
    last = draft.model.layers[-1]
    last.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    thresholds = (0.4, 0.5, 0.0)[-len(exits) :]
    options = dict(exits=exits, thresholds=thresholds, tree=shape, temperature=1.0)
    for seed, length in enumerate((1, 40, 40)):
        prompt = random_tokens(seed, length)
        generate(target, prompt, draft, seed=seed, max_new_tokens=12, **options)
        if seed == 1:
            monkeypatch.setattr(SortedDraft, "choose_exit", any_exit)
    assert lagging > 0 and max(rows) < 25  # the context is read in windows


def test_no_layers_run_behind_the_exit_that_drafts():
    target, draft = nearly_equal(8)
    runs, left = [], set()
    for number, block in enumerate(draft.model.layers, 1):
        block.register_forward_hook(lambda *_, number=number: runs.append(number))
    options = dict(exits=(1, 2, 3, 4), thresholds=(0.35, 0.35, 0.35, 0.0), draft_length=1)
    for seed in range(20):
        runs.clear()
        step = next(iter(start(target, random_tokens(seed, 12), draft, **options)))
        [_, exit] = step.tree.exit_layers
        assert runs == list(range(1, exit + 1))
        left.add(exit)
    assert len(left) > 2
