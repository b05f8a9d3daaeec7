"""The sorted draft: after any history every exit predicts what a cache-free pass predicts."""

import random
from itertools import accumulate
from operator import mul

import pytest
import torch
from helpers import path_of, random_llama, random_parents, random_tokens, sorted_draft
from s2d.proposal import LeastProbable, Proposal

from s2d.sampling import Sampler, Sampling
from s2d.tree import Dynamic, KConfig, TokenTree, TreeAttention
from s2d.verify import Verdict

CAPACITY = 100
CHAIN = KConfig((1,) * 20)


def cache_free_logits(model, tokens, exit_layer):
    """What follows ``tokens``, a list, at an exit: (V,)."""
    hidden = model.embed(torch.tensor([tokens]))
    return model.logits(model.run_layers(hidden, 0, exit_layer))[0, -1]


def cache_free_confidences(model, tokens, exits):
    return [cache_free_logits(model, tokens, each).softmax(-1).max().item() for each in exits]


def force_exit(drafter, index):
    """Thresholds that no, or every, confidence exceeds: tokens leave at exit ``index``."""
    for number, each in enumerate(drafter.exits):
        each.threshold = 0.0 if number >= index else 1.0


def drafter_of(model, exits, thresholds, shape=CHAIN, floor=0.0):
    return sorted_draft(model, exits, thresholds, shape, CAPACITY, LeastProbable(floor))


def grow(drafter, context, levels, temperature=0.0, top_p=1.0, replacement=False):
    sampling = Sampling(temperature, top_p, replacement, Sampler(0, "cpu"))
    return drafter.grow(context, levels, sampling)


def accept(drafter, context, proposal, path):
    """The context behind an accepted path and a bonus token of 7."""
    drafter.keep(len(context), proposal, Verdict(path, [], [], None), None)
    return context + proposal.tree.tokens[path].tolist() + [7]


@pytest.mark.parametrize("exits", [(4,), (2, 4), (1, 2, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_every_exit_equals_a_cache_free_forward(exits, seed):
    """Random histories of trees, chains among them: exits change, some path is kept, and again."""
    rng, model = random.Random(f"{exits} {seed}"), random_llama(seed)
    drafter = drafter_of(model, exits, [0.0] * len(exits), Dynamic(top_k=5, depth=6, size=30))
    context = random_tokens(seed, rng.randrange(1, 20))
    caught_up = 0
    while (n := len(context)) < 80:
        size = rng.randrange(1, 20)
        parents = list(range(-1, size - 1)) if rng.random() < 0.3 else random_parents(rng, size)
        tree = TokenTree(torch.tensor([rng.randrange(4) for _ in parents]), torch.tensor(parents))
        depths = [len(path_of(parents, node)) - 1 for node in range(size)]
        for level in range(-1, rng.randrange(-1, max(depths) + 1)):  # -1: what follows the context
            nodes = [node for node, depth in enumerate(depths) if depth == level] or [-1]
            wanted, end = rng.randrange(len(exits)), n + nodes[-1] + 1
            force_exit(drafter, wanted)
            caught_up += end - drafter.exits[wanted].filled > len(nodes)
            prediction, tried = drafter.predict(TreeInSlots(tree, context, nodes, end))
            paths = [context + tree.tokens[path_of(parents, node)].tolist() for node in nodes]
            expected = [cache_free_logits(model, path, exits[wanted]) for path in paths]
            exit_layer, confidence = tried[-1]
            assert exit_layer == exits[wanted]
            assert (prediction.logits - torch.stack(expected)).abs().max() < 1e-10
            assert abs(confidence - torch.stack(expected).softmax(-1).max()) < 1e-10
        path = path_of(parents, rng.randrange(-1, size))
        context = accept(drafter, context, Proposal(tree, slots=range(size)), path)
    assert caught_up > 3


class TreeInSlots:
    """A tree that is drafted already, as an exit sees it: asked about the nodes ``frontier``."""

    def __init__(self, tree, context, frontier, end):
        self.tree, self.context, self.frontier, self.end = tree, context, frontier, end

    def slot_tokens(self):
        return self.tree.tokens

    def attention(self):
        return TreeAttention(self.tree.parents, torch.float64)


def test_thresholds_choose_the_shallowest_exit_that_is_confident_enough():
    model, exits = random_llama(8), (1, 2, 3, 4)
    for seed in range(20):
        tokens = random_tokens(seed, 12)
        confidences = cache_free_confidences(model, tokens, exits)
        for thresholds in ([0.3, 0.3, 0.3, 0.0], [0.9, 0.4, 0.2, 0.0], [0.2, 0.6, 1.0, 0.0]):
            draft = grow(drafter_of(model, exits, thresholds), tokens, 1)
            enough = [e for e, c, t in zip(exits, confidences, thresholds) if c > t]
            assert draft.exits == enough[:1]
            tried = exits[: exits.index(enough[0]) + 1]
            [found] = draft.confidences
            assert [e for e, _ in found] == list(tried)
            assert [c for _, c in found] == pytest.approx(confidences[: len(tried)], abs=1e-10)


def test_a_level_leaves_where_its_most_confident_node_does():
    """The level rule of the draft tree: one confident node is enough for all of them."""
    model, exits, thresholds = random_llama(8), (1, 2, 4), (0.5, 0.4, 0.0)
    left = set()
    for seed in range(30):
        context = random_tokens(seed, 8)
        draft = grow(drafter_of(model, exits, thresholds, KConfig((3, 2))), context, 2)
        each = [
            cache_free_confidences(model, [*context, root], exits)
            for root in draft.tree.tokens[:3].tolist()
        ]
        best = [max(column) for column in zip(*each)]
        assert draft.exits[3] == next(e for e, c, t in zip(exits, best, thresholds) if c > t)
        left.add((draft.exits[3], min(row[0] for row in each) > 0.5))
    assert left >= {(1, False), (2, False), (4, False)}


def test_a_shallow_exit_runs_no_deeper_layer():
    model = random_llama(9)
    calls = []
    for number, block in enumerate(model.model["layers"]):
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
    grow(drafter_of(model, (1, 3), [0.0, 0.0]), [0] * 5, 1)
    assert calls == [0]


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("widths", [(1,) * 6, (3, 2, 2), (2, 1, 1)])
def test_a_draft_keeps_the_distributions_its_tokens_were_drawn_from(widths, replacement):
    model, context = random_llama(10), [5, 9, 1, 7]
    drafter = drafter_of(model, (2, 4), [0.4, 0.0], KConfig(widths))
    draft = grow(drafter, context, 6, 0.7, 0.9, replacement)
    tokens, parents = draft.tree.tokens, draft.tree.parents.tolist()
    depths = [len(path_of(parents, node)) - 1 for node in range(-1, len(parents))]
    assert draft.depth == len(widths)
    exits = {depth: exit_layer for depth, exit_layer in zip(depths[1:], draft.exits)}
    for node in [node for node in range(-1, len(parents)) if depths[node + 1] < len(widths) - 1]:
        level = depths[node + 1] + 1
        path = context + tokens[path_of(parents, node)].tolist()
        raw = torch.softmax(cache_free_logits(model, path, exits[level]) / 0.7, dim=-1)
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
    model, context = random_llama(10), [5, 9, 1, 7]
    draft = grow(drafter_of(model, (4,), [0.0], KConfig((3, 2))), context, 2)
    roots, *below = draft.tree.tokens.split([3, 2, 2, 2])
    for path, children in zip([[], *roots[:, None].tolist()], [roots, *below]):
        expected = cache_free_logits(model, context + path, 4).topk(len(children)).indices
        assert torch.equal(children, expected)
    assert draft.q is None


def slow_dynamic_tree(model, context, shape):
    """The paths of a Dynamic tree with one exit, by plain search.

    Nodes may be expanded that cannot be in the tree; that changes nothing but the search's time.
    """
    candidates, expanded = {(): 0.0}, set()
    for _ in range(shape.depth):
        best = sorted(candidates, key=lambda path: -candidates[path])
        waiting = [path for path in best if path not in expanded and len(path) < shape.depth]
        for path in waiting[: shape.top_k]:
            expanded.add(path)
            log_probs = cache_free_logits(model, [*context, *path], 4).log_softmax(-1)
            best = log_probs.topk(shape.top_k)
            for gain, token in zip(best.values.tolist(), best.indices.tolist()):
                candidates[(*path, token)] = candidates[path] + gain
    del candidates[()]
    return set(sorted(candidates, key=lambda path: -candidates[path])[: shape.size])


SHAPES = [
    *(Dynamic(3, 4, 9), Dynamic(4, 3, 40), Dynamic(2, 6, 5)),
    *(Dynamic(1, 4, 4), Dynamic(10, 4, 60)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_dynamic_tree_is_the_best_of_its_candidates(shape, seed):
    """Three in a row, behind paths that were kept from slots unlike the nodes' numbers."""
    model, context = random_llama(seed, scale=0.2), [5, 9, seed]
    drafter = drafter_of(model, (4,), [0.0], shape)
    for _ in range(3):
        draft, n = grow(drafter, context, shape.depth), len(context)
        tree, parents = draft.tree, draft.tree.parents.tolist()
        paths = [tuple(tree.tokens[path_of(parents, i)].tolist()) for i in range(len(tree))]
        assert len(set(paths)) == len(paths)
        assert set(paths) == slow_dynamic_tree(model, context, shape)
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)
        assert draft.depth == max(map(len, paths)) and draft.exits == [4] * len(tree)
        path = path_of(parents, len(tree) - 1)
        context = accept(drafter, context, draft, path)
        # All but a last leaf had been through the draft.
        assert drafter.exits[0].filled >= n + len(path) - 1


def test_the_floor_ends_the_draft_where_its_path_is_unlikely():
    """The token that makes it so is sent: its pass was made. A growing tree keeps none such."""
    model, context, thresholds = random_llama(11), [3, 1, 4], [0.6, 0.0]
    free = grow(drafter_of(model, (2, 4), thresholds), context, 20)
    paths = list(accumulate((found[-1][1] for found in free.confidences), mul))
    for last in range(1, 19):
        floor = (paths[last - 1] + paths[last]) / 2
        stopped = grow(drafter_of(model, (2, 4), thresholds, floor=floor), context, 20)
        assert stopped.tree.tokens.tolist() == free.tree.tokens[: last + 1].tolist()
        assert len(stopped.exits) == last + 1 and stopped.stopped == "confidence"
    for shape, sent in ((CHAIN, 1), (Dynamic(3, 4, 9), 0)):
        found = grow(drafter_of(model, (4,), [0.0], shape, floor=1.0), context, 4)
        assert len(found.tree) == len(found.exits) == sent
