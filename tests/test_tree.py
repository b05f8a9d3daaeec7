"""Token trees: after every node the model predicts what it does after that node's own text."""

import random
from functools import partial

import pytest
import torch
from helpers import ancestors_of, random_llama, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from s2d import decoder, draft, generate
from s2d.mask import positions_and_mask
from s2d.tree import GrowingShape, Proposal, Tree


def test_no_child_is_sent_without_its_parent():
    """Not even if a rule's estimate is, by rounding, above 1."""
    tree = Tree.root([1])
    for node in range(4):
        tree = tree.add_level([node], Proposal([[5]], [[1.0 + 1e-7]]), exit_layer=1)
    sent = GrowingShape(top_k=1, depth=4, size=2).sent(tree)
    assert tree.prune(sent).parents == (-1, 0, 1)


@pytest.mark.parametrize("seed", range(8))
def test_every_part_of_context_and_tree_against_cache_free_passes(seed):
    """From every position on, after a cache of what is before it; chains as well as trees."""
    rng, model = random.Random(seed), random_llama(seed, num_key_value_heads=(1, 2, 4)[seed % 3])
    context, size = random_tokens(seed, rng.randrange(1, 7)), rng.randrange(10)
    parents = list(range(-1, size))
    if seed % 4:  # sorted, so that nodes are numbered level by level
        parents[1:] = sorted(rng.randrange(node) for node in range(1, size + 1))
    ancestors = ancestors_of(parents)
    paths = [row.nonzero()[0].tolist()[1:] for row in ancestors]
    nodes = [rng.randrange(4) for _ in parents]  # few, so that siblings are often equal
    n, end = len(context), len(context) + size
    new = partial(torch.tensor, device=model.device)
    tokens = new([context + nodes[1:]])
    texts = [context[: i + 1] for i in range(n)]
    texts += [context + [nodes[i] for i in path] for path in paths[1:]]
    expected = torch.stack([model(new([text]))[0, -1] for text in texts])

    def read(tokens, **where):
        return model.logits(model.run_layers(model.embed(tokens), **where))[0]

    for start in range(end):
        cache = model.new_cache()
        for first, last in ((0, start), (start, end)):
            if first == last:
                continue
            own = ancestors[: 1 + max(0, last - n), : 1 + max(0, last - n)]
            n_read = min(n, last)
            positions, mask = positions_and_mask(first, n_read, own, model.device, model.dtype)
            logits = read(tokens[:, first:last], positions=positions, mask=mask, cache=cache)
            assert (logits - expected[first:last]).abs().max() < 1e-10
        # Roll back to the context and an accepted path, and read one token more.
        path = rng.choice(paths)
        cache.keep(n, [n - 1 + node for node in path])
        text = [*context, *(nodes[i] for i in path), 7]
        row = read(new([[7]]), cache=cache)[0]
        assert (row - model(new([text]))[0, -1]).abs().max() < 1e-10


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of a tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        returned = result if isinstance(result, tuple | list) else [result]
        sizes = [each.numel() for each in returned if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


def test_no_tensor_grows_with_the_square_of_the_context(monkeypatch):
    """Four times the context: the largest tensor, the caches', four times. Segments lag behind."""
    monkeypatch.setattr(draft, "MAX_UNREAD", 32)
    monkeypatch.setattr(decoder, "MAX_UNREAD", 32)
    largest = {}
    for length in (128, 512):
        sizes = dict(max_position_embeddings=2 * length, num_hidden_layers=3, eos_token_ids=())
        target, drafts = random_llama(0, **sizes), random_llama(1, **sizes)
        options = dict(exits=(1, 2, 3), thresholds=(0.3, 0.4, 0.0), max_new_tokens=30)
        with LargestTensor() as seen:
            generate(target, random_tokens(0, length - 40), drafts, method="s2d-tree", **options)
        largest[length] = seen.largest
    assert largest[512] <= 4.2 * largest[128]
