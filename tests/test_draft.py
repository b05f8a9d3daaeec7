"""The sorted draft: after any history every exit predicts what a cache-free pass predicts."""

import random
from itertools import accumulate
from operator import mul

import pytest
import torch
from helpers import path_of, random_llama, random_parents, random_tokens, sorted_draft

from s2d import generate
from s2d.draft import WINDOW
from s2d.generate import Options
from s2d.sampling import Sampling
from s2d.tree import CONTEXT, Dynamic, KConfig, Tree

CHAIN = KConfig((1,) * 20)


def cache_free_logits(model, tokens, layer):
    """What follows ``tokens``, a list, after ``layer`` layers: (V,)."""
    return model.logits(model.run_layers(model.embed(torch.tensor([tokens])), 0, layer))[0, -1]


def confidences(model, tokens, exits):
    return [cache_free_logits(model, tokens, each).softmax(-1).max().item() for each in exits]


def drafter_of(model, exits, thresholds, shape=CHAIN, **options):
    return sorted_draft(model, exits, thresholds, shape, capacity=100, **options)


def grown(drafter, context, levels=20, **options):
    tree = Tree(context, drafter.shape, levels, drafter.min_prob)
    drafter.grow(tree, Sampling(Options(**options), drafter.exits[-1].model))
    return tree


@pytest.mark.parametrize("exits", [(4,), (2, 4), (1, 2, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_every_exit_equals_a_cache_free_forward(exits, seed):
    """Random trees of which some nodes are expanded, at any exit; a path is kept, and again."""
    rng, model = random.Random(f"{exits} {seed}"), random_llama(seed)
    shape = Dynamic(top_k=9, depth=20, size=30)
    drafter = drafter_of(model, exits, thresholds=[0.0] * len(exits), shape=shape)
    context, caught_up = random_tokens(seed, rng.randrange(1, 20)), 0
    while len(context) < 80:
        size = rng.randrange(1, 20)
        parents = list(range(-1, size - 1)) if rng.random() < 0.3 else random_parents(rng, size)
        tree = Tree(context, shape, max_levels=20)
        tree.tokens, tree.parents = [rng.randrange(4) for _ in parents], parents
        tree.depths = [len(path_of(parents, node)) - 1 for node in range(size)]
        tree.sent = list(range(size))
        for level in range(rng.randrange(max(tree.depths) + 1)):
            if level > 0:  # else what follows the context
                below = [i for i in range(size) if parents[i] in tree.frontier]
                tree.frontier = rng.sample(below, rng.randrange(len(below) + 1))
                tree.expanded += tree.frontier
                if not tree.frontier:
                    break
            exit = rng.choice(drafter.exits)
            for each in drafter.exits:  # no confidence, or every one, is above this
                each.threshold = 0.0 if each.layer >= exit.layer else 1.0
            end = len(context) + len(tree.expanded)
            caught_up += end - exit.cache.length > len(tree.frontier)
            used, prediction = drafter.predict(tree)
            paths = [context + tree.path(node) for node in tree.frontier]
            expected = [cache_free_logits(model, path, exit.layer) for path in paths]
            expected = torch.stack(expected).softmax(dim=-1)
            assert used is exit and (prediction.probs - expected).abs().max() < 1e-10
            assert prediction.confidence == pytest.approx(expected.max().item(), abs=1e-10)
        reached = {CONTEXT, *tree.expanded}
        last = rng.choice([CONTEXT, *(i for i in range(size) if parents[i] in reached)])
        drafter.keep(tree, path_of(parents, last))
        context = context + tree.path(last) + [7]
    assert caught_up > 2


def test_an_exit_that_lags_far_behind_reads_the_context_in_windows():
    model = random_llama(3, max_position_embeddings=1000)
    drafter = sorted_draft(model, (1, 4), thresholds=(0.0, 0.0), shape=CHAIN, capacity=900)
    context, widths = random_tokens(0, 30), []
    for threshold, length in ((1.0, 30), (0.0, 800), (1.0, 810)):  # exit 4 runs first and last
        context += random_tokens(length, length - len(context))
        drafter.exits[0].threshold = threshold
        hook = model.model["layers"][3].register_forward_hook(
            lambda _, given, __: widths.append(given[0].shape[1])
        )
        tree = grown(drafter, context, levels=3)
        hook.remove()
        for i, exit in enumerate(tree.exits):
            assert exit == (4 if threshold else 1)
            expected = cache_free_logits(model, context + tree.tokens[:i], exit).argmax()
            assert tree.tokens[i] == expected
        drafter.keep(tree, [])
    # The first context but its last token; that token and two nodes; 780 positions in windows.
    assert WINDOW == 256 and widths == [30, 1, 1, 256, 256, 256, 12, 1, 1]


def test_the_first_exit_that_is_confident_enough_drafts_and_none_behind_it_runs():
    model, exits, runs = random_llama(8), (1, 2, 3, 4), []
    for number, block in enumerate(model.model["layers"]):
        block.register_forward_hook(lambda *_, number=number: runs.append(number))
    for seed in range(20):
        context = random_tokens(seed, 12)
        found = confidences(model, context, exits)
        for thresholds in ([0.3, 0.3, 0.3, 0.0], [0.9, 0.4, 0.2, 0.0], [0.2, 0.6, 1.0, 0.0]):
            runs.clear()
            tree = grown(drafter_of(model, exits, thresholds), context, levels=1)
            enough = [e for e, c, t in zip(exits, found, thresholds) if c > t]
            assert tree.exits == enough[:1] and runs == list(range(enough[0]))
            assert tree.likelihood == pytest.approx(found[enough[0] - 1], abs=1e-10)


def test_a_level_leaves_where_its_most_confident_node_does():
    """One confident node is enough for all of them."""
    model, exits, thresholds = random_llama(8), (1, 2, 4), (0.5, 0.4, 0.0)
    left = set()
    for seed in range(30):
        context = random_tokens(seed, 8)
        tree = grown(drafter_of(model, exits, thresholds, KConfig((3, 2))), context)
        each = [confidences(model, [*context, root], exits) for root in tree.tokens[:3]]
        best = [max(column) for column in zip(*each)]
        assert tree.exits[3] == next(e for e, c, t in zip(exits, best, thresholds) if c > t)
        left.add((tree.exits[3], min(row[0] for row in each) > 0.5))
    assert left >= {(1, False), (2, False), (4, False)}


@pytest.mark.parametrize("widths", [(1,) * 6, (3, 2, 2)])
def test_a_draft_keeps_the_distributions_its_tokens_were_drawn_from(widths):
    model, context = random_llama(10), [5, 9, 1, 7]
    drafter = drafter_of(model, (2, 4), [0.4, 0.0], KConfig(widths))
    tree = grown(drafter, context, coupled=False, temperature=0.7, top_p=0.9)
    assert len(tree.tokens) == drafter.shape.max_nodes
    for node, q in zip([CONTEXT, *range(len(tree.tokens))], torch.cat(tree.q)):
        children = [i for i, parent in enumerate(tree.parents) if parent == node]
        logits = cache_free_logits(model, context + tree.path(node), tree.exits[children[0]])
        raw = torch.softmax(logits / 0.7, dim=-1)
        kept = q > 0
        assert raw[kept].sum() >= 0.9 > raw[kept].sum() - raw[kept].min()
        assert (q - raw * kept / raw[kept].sum()).abs().max() < 1e-12
        tokens = [tree.tokens[i] for i in children]
        assert len(set(tokens)) == len(tokens) == widths[tree.depths[node] + 1]
        assert kept[tokens[: int(kept.sum())]].all()


def slow_growing_tree(model, context, shape):
    """The paths of a Dynamic tree with one exit, by plain search.

    Nodes may be expanded that cannot be in the tree; that changes nothing but the search's time.
    """
    found, expanded = {(): 0.0}, set()
    for _ in range(shape.depth):
        waiting = [path for path in found if path not in expanded and len(path) < shape.depth]
        for path in sorted(waiting, key=found.get, reverse=True)[: shape.top_k]:
            expanded.add(path)
            log_probs = cache_free_logits(model, [*context, *path], 4).log_softmax(-1)
            gains, tokens = log_probs.topk(shape.top_k)
            for gain, token in zip(gains.tolist(), tokens.tolist()):
                found[(*path, token)] = found[path] + gain
    del found[()]
    return set(sorted(found, key=found.get, reverse=True)[: shape.size])


SHAPES = [Dynamic(3, 4, 9), Dynamic(4, 3, 40), Dynamic(2, 6, 5), Dynamic(1, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_a_growing_tree_is_the_best_of_its_candidates(shape, seed):
    """Three in a row, behind accepted paths; where there is one, to a leaf never expanded."""
    model, context = random_llama(seed, scale=0.2), [5, 9, seed]
    drafter = drafter_of(model, (4,), [0.0], shape)
    for _ in range(3):
        tree = grown(drafter, context)
        paths = [tuple(tree.path(node)) for node in tree.sent]
        assert len(set(paths)) == len(paths)
        assert set(paths) == slow_growing_tree(model, context, shape)
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)
        _, parents = tree.part(tree.sent)
        leaves = [i for i, node in enumerate(tree.sent) if node not in tree.expanded]
        last = max(leaves, default=0)
        path = path_of(parents, last)
        drafter.keep(tree, path)
        held = len(path) - len(leaves[:1])
        assert drafter.exits[0].cache.length == len(context) + held
        context = [*context, *paths[last], 7]


def test_drafting_ends_where_the_path_is_unlikely():
    """The token that makes it so is sent: it was drawn. A growing tree keeps none such."""
    model, context, thresholds = random_llama(11), [3, 1, 4], [0.6, 0.0]
    free = grown(drafter_of(model, (2, 4), thresholds), context)
    each = [
        max(confidences(model, context + free.tokens[:i], [exit]))
        for i, exit in enumerate(free.exits)
    ]
    likelihoods = list(accumulate(each, mul))
    for last in range(1, 19):
        min_prob = (likelihoods[last - 1] + likelihoods[last]) / 2
        tree = grown(drafter_of(model, (2, 4), thresholds, stop=min_prob), context)
        assert tree.tokens == free.tokens[: last + 1]
    growing = grown(drafter_of(model, (4,), [0.0], Dynamic(3, 4, 9), stop=0.05), context)
    assert min(growing.probs) >= 0.05 and 0 < len(growing.sent) < 9
    most = grown(drafter_of(model, (4,), [0.0], Dynamic(3, 4, 9), nodes_to_send=len), context)
    fewer = drafter_of(model, (4,), [0.0], Dynamic(3, 4, 9), nodes_to_send=lambda probs: 5)
    best = sorted(most.sent, key=most.probs.__getitem__, reverse=True)[:5]
    assert sorted(grown(fewer, context).sent) == sorted(best)


@pytest.mark.parametrize("options", [dict(), dict(temperature=1.0, coupled=False)])
@pytest.mark.parametrize("method", ["sd", "s2d", "mcsd", "s2d-tree"])
def test_all_that_a_draft_drafts_that_is_the_target_is_accepted(method, options):
    if method == "s2d-tree":
        options = options | dict(tree=(2, 2, 1))  # a growing tree is for shared noise
    same = random_llama(5, eos_token_ids=(), exit_layers=(2, 4), thresholds=(1.0, 0.0))
    stats = generate(same, [3, 1, 4], same, method, max_new_tokens=60, **options).stats
    assert stats.acceptance_rate == 1.0 and stats.exit_counts.keys() == {4}
