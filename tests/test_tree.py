"""Token trees: after every node the model predicts what it does after that node's own text."""

import random

import pytest
import torch
from definition import logits_after
from helpers import Operations, random_llama, random_tokens

from s2d import generate
from s2d.draft import SortedDraft
from s2d.mask import inputs
from s2d.tree import GrowingShape, Node, Tree


def test_no_child_is_sent_without_its_parent():
    """Not even if a rule's estimate is, by rounding, above 1."""
    tree = Tree([1], GrowingShape(top_k=1, depth=4, size=2))
    for _ in range(4):
        parent = tree.nodes[-1]
        tree.add_level([parent], [parent.child(5, 1.0 + 1e-7, exit_layer=1)])
    assert tree.shape.sent(tree.nodes) == tree.nodes[:3]


@pytest.mark.parametrize("seed", range(8))
def test_every_part_of_context_and_tree_against_cache_free_passes(seed):
    """From every position on, after a cache of what is before it; chains as well as trees."""
    rng = random.Random(seed)
    model = random_llama(seed, num_key_value_heads=(1, 2, 4)[seed % 3])
    tree = Tree(random_tokens(seed, rng.randrange(1, 7)), GrowingShape(1, 1, 1))
    for _ in range(rng.randrange(10)):
        parent = rng.choice(tree.nodes) if seed % 4 else tree.nodes[-1]
        # Few tokens, so that siblings are often equal.
        tree.add_level([parent], [parent.child(rng.randrange(4), 0.5, exit_layer=1)])
    context, nodes, n = tree.context, tree.nodes, len(tree.context)

    def read(*given):
        tokens, positions, mask = inputs(*given, like=model.model.norm.weight)
        hidden = model.embed(tokens)
        hidden = model.run_layers(hidden, positions=positions, mask=mask, cache=cache)
        return model.logits(hidden)[0]

    texts = [context[:end] for end in range(1, n)] + [tree.text(node) for node in nodes]
    rows = torch.stack([logits_after(model, text) for text in texts])
    for start in range(len(texts)):
        cache = model.new_cache()
        some = nodes[: start - n + 1] if start >= n else [Node(context[start - 1])]
        before = read(context[:start], some, 0) if start else rows[:0]
        assert (torch.cat((before, read(context, nodes, start))) - rows).abs().max() < 1e-10
        # Roll back to the context and an accepted path, and read two tokens more.
        last = rng.choice(nodes)
        cache.keep(n, [n - 1 + nodes.index(node) for node in last.path[1:]])
        text = [*tree.text(last), 7, 5]
        _, found = read(text, [Node(5)], cache.length)
        assert (found - logits_after(model, text)).abs().max() < 1e-10


class Seldom(SortedDraft):
    """Its last exit is asked in the first step, and again when the context is nearly full."""

    def choose_exit(self, tree, nodes, rule):
        full = len(tree.context) / self.exits[-1].max_positions
        return self.ask(self.exits[-1 if full == 0.75 or full > 0.95 else 0], tree, nodes, rule)


def test_no_tensor_grows_with_the_square_of_the_context(monkeypatch):
    """Four times the context: the largest tensor, the caches', four times. Segments lag behind."""
    monkeypatch.setattr("s2d.mask.MAX_PROMPT", 16)
    largest = {}
    options = dict(exits=(1, 2), drafter=Seldom, tree=(2,), max_new_tokens=999)
    for length in (64, 256):
        sizes = dict(max_position_embeddings=length, num_hidden_layers=2, eos_token_ids=())
        model = random_llama(0, **sizes)
        with Operations() as seen:
            found = generate(model, random_tokens(0, 3 * length // 4), model, **options)
        assert found.stats.sent.keys() == {1, 2}
        largest[length] = seen.largest
    assert largest[256] <= 4.2 * largest[64]
