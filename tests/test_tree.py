"""Token trees: masks and positions against climbing; every node equals its own chain."""

import random
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from helpers import path_of, random_llama, random_parents, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from s2d import draft, generate
from s2d.tree import KConfig, Tree, ancestor_mask, positions_and_mask

CPU = SimpleNamespace(device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("seed", range(20))
def test_positions_and_mask_against_climbing(seed):
    """For every part of a context and the tree behind it; ancestors given or not."""
    rng = random.Random(seed)
    n, size = rng.randrange(1, 9), rng.randrange(12)
    parents = list(range(-1, size - 1)) if seed % 4 == 0 else random_parents(rng, size)
    paths = [path_of(parents, node) for node in range(size)]
    positions = [*range(n), *(n + len(path) - 1 for path in paths)]
    seen = [list(range(i + 1)) for i in range(n)]
    seen += [[*range(n), *(n + node for node in path)] for path in paths]
    chain, ancestors = seed % 4 == 0 or size < 2, ancestor_mask(parents)
    assert [row.nonzero()[0].tolist() for row in ancestors] == paths
    for start in range(n + size):
        own_positions, mask = positions_and_mask(
            start, n, parents, CPU, rng.choice((None, ancestors))
        )
        assert chain or own_positions is not None
        if own_positions is not None:
            assert own_positions.tolist() == positions[start:]
        if mask is None:
            assert chain and (start == 0 or start == n + size - 1)
            continue
        assert mask.shape == (n + size - start, n + size)
        assert [(row == 0).nonzero().flatten().tolist() for row in mask] == seen[start:]
        assert (mask[mask != 0] == -torch.inf).all()


@pytest.mark.parametrize("widths", [(1, 1, 1), (4, 2, 2, 1), (2, 4, 1), (5,), ()])
def test_the_mask_of_a_fixed_shape_is_made_once_and_sliced(widths):
    """It is numbered as a tree of this shape grows: level by level."""
    shape = KConfig(widths)
    tree = Tree([1], shape, max_levels=9)
    for width in widths:
        nodes = len(tree.frontier)
        tree.add_level([range(width)] * nodes, [[0.5] * width] * nodes, exit=1)
        size = len(tree.tokens)
        assert (shape.ancestors[:size, :size] == ancestor_mask(tree.parents)).all()
        given = positions_and_mask(1, 1, tree.parents, CPU, shape.ancestors)
        made = positions_and_mask(1, 1, tree.parents, CPU)
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(given, made))
    assert tree.frontier == [] and len(tree.tokens) == shape.max_nodes


def test_the_pictures_of_the_docstrings():
    parents = [-1, -1, 0, 0, 2]
    positions, mask = positions_and_mask(4, 5, parents[:3], CPU)
    assert positions.tolist() == [4, 5, 5, 6]
    for name, row in zip("e012", mask.tolist(), strict=True):
        row = " ".join("x" if each == 0 else "." for each in row)
        assert f"{name}     {row[:7]}   {row[8:]} " in positions_and_mask.__doc__
    lines = [line for line in ancestor_mask.__doc__.splitlines() if line.endswith((" .", " 4"))]
    for line, row in zip(lines, ancestor_mask(parents), strict=True):
        assert line.split()[-5:] == [str(j) if seen else "." for j, seen in enumerate(row)]
    tree = Tree([1], KConfig((2, 2)), max_levels=2)
    tree.add_level([[7, 8]], [[0.6, 0.4]], exit=1)
    tree.add_level([[9, 10], [11, 12]], [[0.5, 0.5]] * 2, exit=2)
    assert tree.part([0, 1, 2, 4]) == ([7, 8, 9, 11], [-1, -1, 0, 1])
    assert tree.path(4) == [8, 11] and tree.exits == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_part_of_context_and_tree_against_a_cache_free_forward(chain, kv_heads):
    """Behind a cache that holds what is before it, from every position on."""
    rng, model = random.Random(kv_heads), random_llama(kv_heads, num_key_value_heads=kv_heads)
    context, parents = random_tokens(0, 6), random_parents(rng, 9)
    if chain:
        parents = list(range(-1, 8))
    nodes = [rng.randrange(4) for _ in parents]  # few, so that siblings are often equal
    tokens, n = torch.tensor([context + nodes]), len(context)
    expected = [context[: i + 1] for i in range(n)]
    expected += [context + [nodes[i] for i in path_of(parents, node)] for node in range(9)]
    expected = torch.stack([model(torch.tensor([each]))[0, -1] for each in expected])
    for start in range(n + 9):
        cache = model.new_cache(n + 10)
        for first, end in ((0, start), (start, n + 9)):
            if first == end:
                continue
            own = parents[: max(0, end - n)]
            positions, mask = positions_and_mask(first, min(n, end), own, model)
            part = dict(positions=positions, mask=mask, cache=cache)
            logits = model(tokens[:, first:end], **part)[0]
            assert (logits - expected[first:end]).abs().max() < 1e-10
        # Roll back to the context and an accepted path, and read one token more.
        path = path_of(parents, rng.randrange(9))
        cache.keep(n, path)
        known = context + [nodes[i] for i in path]
        row = model(torch.tensor([[7]]), cache=cache)[0, 0]
        assert (row - model(torch.tensor([[*known, 7]]))[0, -1]).abs().max() < 1e-10


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of a tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        returned = result if isinstance(result, tuple | list) else [result]
        sizes = [each.numel() for each in returned if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize("method", ["s2d", "s2d-tree"])
def test_no_tensor_grows_with_the_square_of_the_context(method, monkeypatch):
    """Four times the context: the largest tensor, the caches', four times. Segments lag behind."""
    monkeypatch.setattr(draft, "WINDOW", 32)
    monkeypatch.setattr(import_module("s2d.decode"), "PREFILL", 32)
    largest = {}
    for length in (256, 1024):
        options = dict(eos_token_ids=(), max_position_embeddings=2 * length, num_hidden_layers=3)
        target, drafts = (
            random_llama(0, **options),
            random_llama(1, **options, exit_layers=(1, 2, 3)),
        )
        options = dict(thresholds=(0.3, 0.4, 0.0), max_new_tokens=30)
        with LargestTensor() as seen:
            generate(target, random_tokens(0, length - 40), drafts, method, **options)
        largest[length] = seen.largest
    assert largest[1024] <= 4.2 * largest[256]
