"""Token trees: masks, positions, slices against slow versions; every node equals its own chain."""

import random

import pytest
import torch
from helpers import path_of, random_llama, random_parents, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from s2d import exits as exits_module
from s2d import generate
from s2d.decode import Scorer, run_pass
from s2d.model import whole_mask
from s2d.tree import Dynamic, KConfig, TokenTree, TreeAttention, ancestor_mask


@pytest.mark.parametrize("seed", range(30))
def test_mask_depths_paths_and_slices_against_climbing(seed):
    rng = random.Random(seed)
    parents = random_parents(rng, rng.randrange(1, 40))
    paths = [path_of(parents, node) for node in range(len(parents))]
    ancestors = ancestor_mask(torch.tensor(parents))
    assert [row.nonzero().flatten().tolist() for row in ancestors] == paths
    n = rng.randrange(len(parents) + 1)
    assert torch.equal(ancestor_mask(torch.tensor(parents[:n])), ancestors[:n, :n])


def test_the_pictures_of_the_docstrings():
    tree = TokenTree(torch.tensor([7, 8, 9, 10, 11]), torch.tensor([-1, -1, 0, 0, 2]))
    positions, mask = TreeAttention(tree.parents, torch.float32).span(5, 4, 8)
    assert positions.tolist() == [4, 5, 5, 6]

    def crosses(mask):
        return [" ".join("x" if each == 0 else "." for each in row) for row in mask.tolist()]

    picture = TreeAttention.__doc__
    for name, row in zip("e012", crosses(whole_mask(mask, 4, 4, mask))):
        assert f"{name}     {row[:8]}  {row[8:]}" in picture
    lines = [line for line in ancestor_mask.__doc__.splitlines() if line.endswith((" .", " 4"))]
    for line, row in zip(lines, ancestor_mask(tree.parents).tolist(), strict=True):
        assert line.split()[-5:] == [str(j) if seen else "." for j, seen in enumerate(row)]


@pytest.mark.parametrize(
    "widths", [(1, 1, 1), (4, 2, 2, 1), (3, 1, 1, 1), (2, 4, 3, 1, 1), (5,), ()]
)
def test_k_config_numbers_its_nodes_level_by_level(widths):
    shape = KConfig(widths)
    levels, frontier, parents = [], [-1], []
    for width in widths:
        new = [(parent, child) for parent in frontier for child in range(width)]
        frontier = list(range(len(parents), len(parents) + len(new)))
        parents += [parent for parent, _ in new]
        levels.append(len(new))
    assert shape.parents().tolist() == parents
    assert (shape.size, shape.depth, sum(levels)) == (len(parents), len(widths), len(parents))


@pytest.mark.parametrize("seed", range(20))
def test_attention_of_any_span(seed):
    rng = random.Random(seed)
    parents = list(range(-1, 11)) if seed % 4 == 0 else random_parents(rng, 12)
    attention = TreeAttention(torch.tensor(parents), torch.float32)
    for _ in range(50):
        n, nodes = rng.randrange(1, 31), rng.randrange(13)
        end = n + nodes
        start = rng.choice([0, rng.randrange(max(0, n - 8), end)])
        positions, mask = attention.span(n, start, end)
        depths = [len(path_of(parents, node)) - 1 for node in range(nodes)]
        given = torch.arange(start, end) if positions is None else positions
        assert given.tolist() == [*range(n), *(n + depth for depth in depths)][start:end]
        allowed = torch.zeros(end, end, dtype=torch.bool)
        for i in range(n):
            allowed[i, : i + 1] = True
        for node in range(nodes):
            allowed[n + node, [*range(n), *(n + other for other in path_of(parents, node))]] = True
        causal = torch.ones(end, end, dtype=torch.bool).tril()
        if mask is None:
            assert torch.equal(allowed[start:end], causal[start:end])
        else:
            assert end - start > 1 or nodes > 1  # a lone first node sees all
            rows, columns = mask.shape
            first = end - rows
            assert first == (start or n) and torch.equal(allowed[start:first], causal[start:first])
            assert allowed[first:, : end - columns].all()
            assert torch.equal(mask == 0, allowed[first:, end - columns :])
            assert (mask[mask != 0] == -torch.inf).all()
            if start >= n - 1 and start:  # a view, not a copy
                assert mask.untyped_storage().data_ptr() == attention.mask.data_ptr()


@pytest.mark.parametrize("seed", range(12))
def test_target_sees_every_node_as_the_end_of_a_chain(seed):
    """Eight trees in a row, equal siblings among them, each behind what a roll-back left."""
    rng, model = random.Random(seed), random_llama(seed % 4)
    context = random_tokens(seed, rng.randrange(1, 12))
    scorer = Scorer(model, 120, Dynamic(1, 1, 20))
    for number in range(8):
        parents = random_parents(rng, rng.randrange(1, 20))
        tokens = [rng.randrange(4) for _ in parents]  # few, so that siblings are often equal
        tree = TokenTree(torch.tensor(tokens), torch.tensor(parents))
        logits = scorer.rows(run_pass(model, scorer.wanted(context, tree)))
        assert len(logits) == len(parents) + 1
        paths = [path_of(parents, node) for node in range(-1, len(parents))]
        for path, row in zip(paths, logits):
            chain = context + [tokens[node] for node in path]
            assert (row - model(torch.tensor([chain]))[0, -1]).abs().max() < 1e-10
        path = rng.choice(paths)
        scorer.keep(len(context), path)
        bonus = random_tokens(number, int(number % 3 > 0))  # or none: a root is still to win
        context += [tokens[node] for node in path] + bonus


@pytest.mark.parametrize("method", ["s2d", "s2d-tree"])
def test_no_tensor_grows_with_the_square_of_the_context(method, monkeypatch):
    """The largest tensor that decoding makes, for four times the context: the caches', four times.

    The draft's second segment first runs behind 200 and 1,000 tokens of context, the third far
    behind both.
    """
    monkeypatch.setattr(exits_module, "WINDOW", 32)
    largest = {}
    for length in (256, 1024):
        options = dict(eos_token_ids=(), max_position_embeddings=2 * length, num_hidden_layers=3)
        exits = dict(exit_layers=(1, 2, 3))
        target, drafts = random_llama(0, **options), random_llama(1, **options, **exits)
        prompt = random_tokens(0, length - 40)
        expected = generate(target, prompt, method="ar", max_new_tokens=30).tokens
        how = dict(thresholds=(0.3, 0.4, 0.0), max_new_tokens=30)
        with LargestTensor() as seen:
            assert generate(target, prompt, drafts, method, **how).tokens == expected
        largest[length] = seen.largest
    assert largest[1024] <= 4.2 * largest[256]


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of a tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        returned = result if isinstance(result, tuple | list) else [result]
        tensors = [each for each in returned if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *(tensor.numel() for tensor in tensors), 0)
        return result
