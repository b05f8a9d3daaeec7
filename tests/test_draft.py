"""The sorted draft: whatever happened before, every exit predicts what a cache-free forward predicts."""

import random

import pytest
import torch
from helpers import random_llama, random_parents
from test_tree import path_of

from s2d.draft import SortedDraft
from s2d.sampling import Sampler, Sampling
from s2d.tree import Dynamic, KConfig, TokenTree, ancestor_mask

CAPACITY = 100
CHAIN = KConfig((1,) * 20)


def cache_free_logits(model, tokens, exit_layer):
    return model.logits(model.run_layers(model.embed(tokens), 0, exit_layer))[0, -1]


def force_exit(drafter, index):
    """Thresholds that no, or every, confidence exceeds: the next prediction leaves at segment ``index``."""
    for number, segment in enumerate(drafter.segments):
        segment.threshold = 0.0 if number >= index else 1.0


def grow(drafter, context, n, levels, temperature=0.0, top_p=1.0, replacement=False, stop=None):
    return drafter.grow(
        context, n, levels, Sampling(temperature, top_p, replacement, Sampler(0, "cpu")), stop
    )


@pytest.mark.parametrize("exits", [(4,), (2, 4), (1, 2, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("seed", range(16))
def test_every_exit_equals_a_cache_free_forward(exits, seed):
    """Random histories of trees, chains among them: exits change from level to level, some path is kept, and again."""
    rng, model = random.Random(f"{exits} {seed}"), random_llama(seed)
    drafter = SortedDraft(
        model, exits, [0.0] * len(exits), Dynamic(top_k=5, depth=6, size=30), CAPACITY
    )
    context = torch.randint(
        0, 61, (1, rng.randrange(1, 20)), generator=torch.Generator().manual_seed(seed)
    )
    caught_up = 0
    while (n := context.shape[1]) < 80:
        size = rng.randrange(1, 20)
        parents = list(range(-1, size - 1)) if rng.random() < 0.3 else random_parents(rng, size)
        tree = TokenTree(torch.tensor([rng.randrange(4) for _ in parents]), torch.tensor(parents))
        depths = tree.depths.tolist()
        drafter.tokens[0, :n], drafter.tokens[0, n : n + size] = context, tree.tokens
        drafter.attention.set_tree(ancestor_mask(tree.parents))
        for level in range(-1, rng.randrange(-1, max(depths) + 1)):  # -1: what follows the context
            nodes = [node for node, depth in enumerate(depths) if depth == level] or [-1]
            wanted = rng.randrange(len(exits))
            force_exit(drafter, wanted)
            behind = n + nodes[-1] + 1 - drafter.segments[wanted].cache.length
            prediction = drafter.predict(n, n + nodes[-1] + 1, len(nodes))
            paths = [tree.tokens[path_of(parents, node)] for node in nodes]
            expected = [
                cache_free_logits(model, torch.cat((context, p[None]), 1), exits[wanted])
                for p in paths
            ]
            assert prediction.exit_layer == exits[wanted]
            assert (prediction.logits - torch.stack(expected)).abs().max() < 1e-10
            assert abs(prediction.confidence - torch.stack(expected).softmax(-1).max()) < 1e-10
            caught_up += behind > len(nodes)
        path = path_of(parents, rng.randrange(-1, size))
        drafter.keep(n, path)
        context = torch.cat((context, tree.tokens[path][None], torch.randint(0, 61, (1, 1))), dim=1)
    assert caught_up > 3


def test_thresholds_choose_the_shallowest_exit_that_is_sure_enough():
    model, exits = random_llama(8), (1, 2, 3, 4)
    for seed in range(20):
        tokens = torch.randint(0, 61, (1, 12), generator=torch.Generator().manual_seed(seed))
        sure = [cache_free_logits(model, tokens, e).softmax(-1).max().item() for e in exits]
        for thresholds in ([0.3, 0.3, 0.3, 0.0], [0.9, 0.4, 0.2, 0.0], [0.2, 0.6, 1.0, 0.0]):
            draft = grow(SortedDraft(model, exits, thresholds, CHAIN, 20), tokens, 12, 1)
            assert draft.exits == [
                next(e for e, c, t in zip(exits, sure, thresholds) if c > t or e == exits[-1])
            ]


def test_a_level_leaves_where_its_surest_node_does():
    """The level rule of the draft tree: one confident node is enough for all of them."""
    model, exits, thresholds = random_llama(8), (1, 2, 4), (0.5, 0.4, 0.0)
    left = set()
    for seed in range(30):
        context = torch.randint(0, 61, (1, 8), generator=torch.Generator().manual_seed(seed))
        draft = grow(SortedDraft(model, exits, thresholds, KConfig((3, 2)), 20), context, 8, 2)
        roots = [torch.cat((context, draft.tree.tokens[None, i : i + 1]), dim=1) for i in range(3)]
        sure = [
            [cache_free_logits(model, root, e).softmax(-1).max().item() for root in roots]
            for e in exits
        ]
        assert draft.exits[1] == next(e for e, c, t in zip(exits, sure, thresholds) if max(c) > t)
        left.add((draft.exits[1], min(sure[0]) > 0.5))
    assert left >= {(1, False), (2, False), (4, False)}


def test_a_shallow_exit_runs_no_deeper_layer():
    model = random_llama(9)
    calls = []
    for number, block in enumerate(model.model["layers"]):
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
    grow(
        SortedDraft(model, (1, 3), [0.0, 0.0], CHAIN, 20), torch.zeros(1, 5, dtype=torch.long), 5, 1
    )
    assert calls == [0]


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("widths", [(1,) * 6, (3, 2, 2), (2, 1, 1)])
def test_a_draft_keeps_the_distributions_its_tokens_were_drawn_from(widths, replacement):
    model = random_llama(10)
    context = torch.tensor([[5, 9, 1, 7]])
    drafter = SortedDraft(model, (2, 4), [0.4, 0.0], KConfig(widths), 40)
    draft = grow(drafter, context, 4, 6, 0.7, 0.9, replacement)
    tokens, parents = draft.tree.tokens, draft.tree.parents.tolist()
    assert len(draft.exits) == len(widths)
    for level, exit_layer in enumerate(draft.exits):
        for node in (
            [-1]
            if level == 0
            else [i for i, d in enumerate(draft.tree.depths.tolist()) if d == level - 1]
        ):
            path = torch.cat((context, tokens[path_of(parents, node)][None]), dim=1)
            raw = torch.softmax(cache_free_logits(model, path, exit_layer) / 0.7, dim=-1)
            probs = draft.q[node + 1]
            kept = probs > 0
            assert raw[kept].sum() >= 0.9 > raw[kept].sum() - raw[kept].min()
            assert (probs - raw * kept / raw[kept].sum()).abs().max() < 1e-12
            children = [tokens[i].item() for i, parent in enumerate(parents) if parent == node]
            assert len(children) == widths[level]
            if not replacement:
                assert len(set(children)) == len(children)
                children = children[: int(kept.sum())]
            assert set(children) <= set(kept.nonzero().flatten().tolist())


def test_greedy_children_are_the_likeliest_first():
    model, context = random_llama(10), torch.tensor([[5, 9, 1, 7]])
    draft = grow(SortedDraft(model, (4,), [0.0], KConfig((3, 2)), 40), context, 4, 2)
    tokens = draft.tree.tokens
    assert tokens[:3].tolist() == cache_free_logits(model, context, 4).topk(3).indices.tolist()
    for root in range(3):
        path = torch.cat((context, tokens[None, root : root + 1]), dim=1)
        expected = cache_free_logits(model, path, 4).topk(2).indices.tolist()
        assert tokens[3 + 2 * root : 5 + 2 * root].tolist() == expected
    assert draft.q is None


def slow_dynamic_tree(model, context, shape):
    """The paths of a Dynamic tree with one exit, by plain search: {path: cumulative log-probability}."""
    frontier, candidates = {(): 0.0}, {}
    for _ in range(shape.depth):
        level = {}
        for path, score in frontier.items():
            tokens = torch.cat((context, torch.tensor([path], dtype=torch.long).view(1, -1)), dim=1)
            gains = cache_free_logits(model, tokens, 4).log_softmax(-1)
            best = gains.topk(shape.top_k)
            level |= {
                (*path, t): score + g for g, t in zip(best.values.tolist(), best.indices.tolist())
            }
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: shape.top_k])
    return set(sorted(candidates, key=lambda path: -candidates[path])[: shape.size])


@pytest.mark.parametrize(
    "shape",
    [Dynamic(3, 4, 9), Dynamic(4, 3, 40), Dynamic(2, 6, 5), Dynamic(1, 4, 4), Dynamic(10, 4, 60)],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_dynamic_tree_is_the_best_of_its_candidates(shape, seed):
    """Two in a row, the second behind a path that was kept, from slots that do not follow the nodes' numbers."""
    model, context = random_llama(seed, scale=0.2), torch.tensor([[5, 9, seed]])
    drafter = SortedDraft(model, (4,), [0.0], shape, CAPACITY)
    for _ in range(3):
        n = context.shape[1]
        draft = grow(drafter, context, n, shape.depth)
        tree = draft.tree
        paths = [
            tuple(tree.tokens[path_of(tree.parents.tolist(), i)].tolist()) for i in range(len(tree))
        ]
        assert len(set(paths)) == len(paths) and set(paths) == slow_dynamic_tree(
            model, context, shape
        )
        assert [len(path) - 1 for path in paths] == sorted(len(path) - 1 for path in paths)
        assert draft.level_sizes == tree.depths.bincount(minlength=len(draft.exits)).tolist()
        path = path_of(tree.parents.tolist(), len(tree) - 1)
        drafter.keep(n, draft.slots[path].tolist())
        assert (
            drafter.segments[0].cache.length >= n + len(path) - 1
        )  # all but a last leaf had been through the draft
        context = torch.cat((context, tree.tokens[path][None], torch.tensor([[7]])), dim=1)


def test_stop_ends_the_draft_where_the_last_exit_is_unsure():
    model = random_llama(11)
    context = torch.tensor([[3, 1, 4]])
    free = grow(SortedDraft(model, (2, 4), [0.6, 0.0], CHAIN, 60), context, 3, 20)
    filled = torch.cat((context, free.tree.tokens[None]), dim=1)
    doubts = [
        cache_free_logits(model, filled[:, : 3 + i], 4).softmax(-1).max().item()
        if exit_layer == 4
        else 1.0
        for i, exit_layer in enumerate(free.exits)
    ]
    stop = min(doubts) + 1e-6
    expected = next(i for i, doubt in enumerate(doubts) if doubt < stop)
    assert 0 < expected < 20
    stopped = grow(SortedDraft(model, (2, 4), [0.6, 0.0], CHAIN, 60), context, 3, 20, stop=stop)
    assert len(stopped.exits) == expected
    assert stopped.tree.tokens.tolist() == free.tree.tokens[:expected].tolist()
    for shape in (CHAIN, Dynamic(3, 4, 9)):
        nothing = grow(SortedDraft(model, (4,), [0.0], shape, 60), context, 3, 4, stop=1.0)
        assert len(nothing.tree) == len(nothing.exits) == 0
