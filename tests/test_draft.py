"""The sorted draft: after any history every exit predicts what a cache-free pass predicts."""

import random

import pytest
import torch
from helpers import (
    DEVICE,
    nearly_equal,
    path_of,
    raises_line,
    random_llama,
    random_parents,
    random_tokens,
)

from s2d import generate, start
from s2d.draft import LayerExit, SortedDraft
from s2d.mask import add_nodes
from s2d.rules import Greedy, Prediction
from s2d.tree import FixedShape, GrowingShape, Tree

CHAIN = FixedShape((1,) * 20)


def cache_free_logits(model, tokens, layer):
    """What follows ``tokens``, a list, after ``layer`` layers: (V,)."""
    hidden = model.embed(torch.tensor([tokens], device=model.device))
    return model.logits(model.run_layers(hidden, 0, layer))[0, -1]


def sorted_draft(model, layers, thresholds, shape, capacity=100, **options):
    """A SortedDraft of a model's layers; ``options``: of SortedDraft."""
    exits, previous = [], None
    for layer in layers:
        room = capacity + shape.capacity
        previous = LayerExit(model, previous, layer, room)
        exits.append(previous)
    return SortedDraft(model.config.vocab_size, exits, thresholds, shape, **options)


def grown(drafter, context, levels=20):
    return drafter.grow(drafter.new_tree(context, levels), Greedy())


@pytest.mark.parametrize("exits", [(4,), (2, 4), (1, 2, 3, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_every_exit_equals_a_cache_free_forward(exits, seed, monkeypatch):
    """Random trees of which some nodes are expanded, at any exit; a path is kept, and again."""
    monkeypatch.setattr("s2d.draft.MAX_UNREAD", 8)
    rng, model = random.Random(f"{exits} {seed}"), random_llama(seed)
    shape = GrowingShape(top_k=9, depth=20, size=30)
    drafter = sorted_draft(model, exits, [0.0] * len(exits), shape)
    context, caught_up = random_tokens(seed, rng.randrange(1, 20)), 0
    while len(context) < 80:
        size = rng.randrange(1, 20)
        parents = list(range(-1, size)) if rng.random() < 0.3 else random_parents(rng, size)
        tree = Tree(context, shape, max_depth=20)
        tree.tokens = [context[-1], *(rng.randrange(4) for _ in parents[1:])]
        tree.parents = parents
        tree.depths = [len(path_of(parents, node)) for node in range(size + 1)]
        for parent in parents[1:]:
            tree.ancestors = add_nodes(tree.ancestors, [parent])
        for level in range(rng.randrange(max(tree.depths))):
            if level > 0:  # else what follows the context
                previous = [i for i in range(size + 1) if parents[i] in tree.frontier]
                chosen = rng.sample(previous, rng.randrange(len(previous) + 1))
                tree.frontier = chosen
                tree.expanded += chosen
                if not tree.frontier:
                    break
            exit = rng.choice(drafter.exits)
            layers = [each.exit_layer for each in drafter.exits]
            # No confidence, or every one, is above this.
            drafter.thresholds = [0.0 if layer >= exit.exit_layer else 1.0 for layer in layers]
            end = len(context) - 1 + len(tree.expanded)
            caught_up += end - exit.cache.length > len(tree.frontier)
            used, prediction = drafter.predict(tree)
            paths = [context + tree.path(node) for node in tree.frontier]
            expected = [cache_free_logits(model, path, exit.exit_layer) for path in paths]
            expected = torch.stack(expected).softmax(dim=-1)
            assert used is exit and (prediction.probs - expected).abs().max() < 1e-10
            assert prediction.confidence == pytest.approx(expected.max().item(), abs=1e-10)
        last = rng.choice([0, *(i for i in range(size + 1) if parents[i] in tree.expanded)])
        drafter.keep(tree, path_of(parents, last))
        context = context + tree.path(last) + [7]
    assert caught_up > 2


def test_an_exit_that_lags_behind_reads_the_context_in_windows(monkeypatch):
    monkeypatch.setattr("s2d.draft.MAX_UNREAD", 8)
    model, tokens, widths = random_llama(3), random_tokens(0, 46), []
    drafter = sorted_draft(model, (1, 4), [0.0, 0.0], CHAIN)
    last = model.model.layers[3]
    last.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    for threshold, length in ((1.0, 20), (0.0, 45), (1.0, 46)):  # exit 4 drafts first and last
        drafter.thresholds = [threshold, 0.0]
        drafter.keep(grown(drafter, tokens[:length], levels=1), [])
    assert widths == [8, 8, 4, 8, 8, 8, 2]


def test_no_layers_run_behind_the_exit_that_drafts():
    model, exits, thresholds = random_llama(8), (1, 2, 3, 4), (0.35, 0.35, 0.35, 0.0)
    runs, left = [], set()
    for number, block in enumerate(model.model.layers, 1):
        block.register_forward_hook(lambda *_, number=number: runs.append(number))
    for seed in range(20):
        runs.clear()
        drafter = sorted_draft(model, exits, thresholds, CHAIN)
        [_, exit] = grown(drafter, random_tokens(seed, 12), levels=1).exit_layers
        assert runs == list(range(1, exit + 1))
        left.add(exit)
    assert left == set(exits)


def grown_by_definition(model, context, shape):
    """{path: its probability} of a growing tree: each level from the best paths of the last."""
    found = {}
    frontier = {(): 1.0}
    for _ in range(shape.depth):
        level = {}
        for path, above in frontier.items():
            probs = cache_free_logits(model, [*context, *path], 4).softmax(dim=-1)
            best = probs.topk(shape.top_k).indices.tolist()
            level |= {(*path, token): above * probs[token].item() for token in best}
        found |= level
        frontier = {path: level[path] for path in best_of(level, shape.top_k)}
    return {path: found[path] for path in best_of(found, shape.size)}


def best_of(probs, count):
    return sorted(probs, key=probs.get, reverse=True)[:count]


@pytest.mark.parametrize("seed", range(6))
def test_a_growing_tree_is_the_published_one(seed):
    """Three in a row, after accepted paths; if there is one, to a leaf never expanded."""
    model, context = random_llama(seed, vocab_size=6, scale=0.2), [5, 3, seed]
    shape = GrowingShape(top_k=3, depth=3, size=6)
    drafter = sorted_draft(model, (4,), [0.0], shape)
    for _ in range(3):
        tree = grown(drafter, context)
        probs = grown_by_definition(model, context, shape)
        nodes = range(len(tree.tokens))
        paths = [tuple(tree.path(node)) for node in nodes]
        probs[()] = 1.0  # the root
        assert sorted(paths) == sorted(probs)
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)
        assert tree.probs == pytest.approx([probs[path] for path in paths])
        leaves = [node for node in nodes if node not in tree.expanded]
        last = max(leaves, default=0)
        drafter.keep(tree, path_of(tree.parents, last))
        held = len(paths[last]) - len(leaves[:1])
        assert drafter.exits[0].cache.length == len(context) + held
        context = [*context, *paths[last], 3]


@pytest.mark.parametrize("options", [dict(), dict(temperature=0.7, top_p=0.9, rule="rejection")])
@pytest.mark.parametrize("method", ["sd", "s2d", "mcsd", "s2d-tree"])
def test_all_that_a_draft_drafts_that_is_the_target_is_accepted(method, options):
    if method == "s2d-tree":
        options = options | dict(tree=(2, 2, 1))  # of a growing tree some nodes are left out
    same = random_llama(5, eos_token_ids=(), exits=(2, 4), thresholds=(1.0, 0.0))
    stats = generate(same, [3, 1, 4], same, method, max_new_tokens=60, **options).stats
    assert stats.acceptance_rate == 1.0 and stats.exit_counts.keys() == {4}


class Counting:
    """An exit of one's own: after token t comes t + 1."""

    exit_layer = 0
    max_positions = float("inf")

    def predict(self, tree):
        last = [(tree.context + tree.path(node))[-1] for node in tree.frontier]
        following = [(token + 1) % 61 for token in last]
        return Prediction(torch.eye(61, device=DEVICE)[following], confidence=0.6)

    def keep(self, tree, accepted):
        pass


def test_an_exit_of_ones_own():
    """It has any number, and says itself how sure it is: no default threshold is right for it."""
    target, draft = random_llama(1, eos_token_ids=()), random_llama(2)
    options = dict(max_new_tokens=20, temperature=1.0)
    alone = generate(target, [3, 1], method="ar", **options).tokens
    own = Counting()
    own.exit_layer = 7
    for exits, thresholds in (([own], None), ([own, 2, 4], (0.5, 0.5, 0.0))):
        found = generate(target, [3, 1], draft, exits=exits, thresholds=thresholds, **options)
        assert found.tokens == alone and found.stats.exit_counts[7] > 0
    always = generate(target, [3, 1], draft, exits=[own, 4], thresholds=[0.7, 0], **options)
    assert always.tokens == alone and always.stats.exit_counts.keys() == {4}
    arguments = target, [3, 1], draft
    raises_line(generate, ValueError, "give thresholds", *arguments, exits=[own, 2])
    raises_line(generate, ValueError, "numbers of layers or Exits", *arguments, exits=[Counting])


def test_an_exit_is_told_what_was_accepted():
    """So that it can follow the text: all but the bonus tokens."""
    told = []

    class Following(Counting):
        def keep(self, tree, accepted):
            told.append([tree.tokens[node] for node in accepted])

    target = random_llama(1, eos_token_ids=())
    for options in (dict(method="s2d"), dict(tree=(2, 2)), dict(method="s2d-tree")):
        told.clear()
        found = start(target, [3, 1], exits=[Following()], max_new_tokens=40, **options)
        accepted = [step.tokens[: len(step.accepted)] for step in found]
        assert told[:-1] == accepted[:-1] and sum(map(len, told)) > 0


def test_an_exit_that_predicts_something_else_is_one_line():
    """One row for two nodes, tokens outside the vocabulary, another dtype."""

    class Wrong(Counting):
        def predict(self, tree):
            prediction = super().predict(tree)
            return prediction._replace(probs=self.change(prediction.probs))

    target, wrong = random_llama(1, eos_token_ids=()), Wrong()
    for change, message in (
        (
            lambda probs: probs[:1].repeat(2, 1),
            r"predicts \(2, 61\) in torch.float32; expected \(1,",
        ),
        (lambda probs: torch.nn.functional.pad(probs, (0, 4)), r"predicts \(1, 65\)"),
        (lambda probs: probs.bfloat16(), "in torch.bfloat16; expected"),
    ):
        wrong.change = change
        raises_line(generate, ValueError, message, target, [3, 1], exits=[wrong], tree=(2, 2))


def test_a_shape_of_ones_own():
    """An object with the members of ``Shape``: nodes with even numbers get children."""

    class Even:
        depth, capacity, sends_all = 3, 20, True

        def width(self, depth):
            return 3

        def next_frontier(self, tree):
            last = [node for node, depth in enumerate(tree.depths) if depth == tree.depth]
            return [node for node in last if node % 2 == 0]

        def nodes_to_send(self, tree):
            return list(range(len(tree.tokens)))

    target, draft = nearly_equal(1, eos_token_ids=())
    for options in (dict(), dict(temperature=1.0)):
        found = start(target, [3, 1], draft, tree=Even(), exits=[2, 4], **options)
        alone = generate(target, [3, 1], method="ar", **options)
        parents = {parent for step in found for parent in step.tree.parents[4:]}
        assert found.tokens == alone.tokens and parents == {2, 4, 6}
