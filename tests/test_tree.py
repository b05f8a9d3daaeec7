"""Token trees: masks, positions and slices against slow and obvious versions; every node equals its own chain."""

import random

import pytest
import torch
from helpers import random_llama, random_parents
from torch.utils._python_dispatch import TorchDispatchMode

from s2d import draft, generate
from s2d.decode import _score
from s2d.model import widened
from s2d.tree import KConfig, TokenTree, TreeAttention, ancestor_mask


def path_of(parents, node):
    """Nodes from the root down to ``node``, by climbing."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("seed", range(100))
def test_mask_depths_paths_and_slices_against_climbing(seed):
    rng = random.Random(seed)
    parents = random_parents(rng, rng.randrange(1, 40))
    tree = TokenTree(torch.arange(len(parents)) + 100, torch.tensor(parents))
    paths = [path_of(parents, node) for node in range(len(parents))]
    assert [row.nonzero().flatten().tolist() for row in tree.ancestors] == paths
    assert tree.depths.tolist() == [len(path) - 1 for path in paths]
    n = rng.randrange(len(parents) + 1)
    assert torch.equal(tree[:n].ancestors, tree.ancestors[:n, :n])
    assert tree[:n].tokens.tolist() == list(range(100, 100 + n))


def test_the_examples_of_the_docstrings():
    tree = TokenTree(torch.tensor([7, 8, 9, 10, 11]), torch.tensor([-1, -1, 0, 0, 2]))
    attention = TreeAttention(2, 5, "cpu", torch.float32)
    attention.set_tree(tree.ancestors)
    seen = lambda mask: [
        " ".join("x" if place == 0 else "." for place in row) for row in mask.tolist()
    ]  # noqa: E731
    positions, mask = attention.span(5, 4, 8)
    assert positions.tolist() == [4, 5, 5, 6]
    drawn = TreeAttention.__doc__
    for place, row in zip("de012", seen(attention.table[:5, :5])):
        assert f"{place}       {row}  " in drawn
    for place, row, whole in zip("e012", seen(mask), seen(widened(mask, 8))):
        assert f"{place}       {row}  " in drawn and f"{place}   {whole[:8]} {whole[8:]}" in drawn
    rows = [
        line.split()[-5:]
        for line in ancestor_mask.__doc__.splitlines()
        if line.endswith((" .", " 4"))
    ]
    assert rows == [
        [str(j) if seen else "." for j, seen in enumerate(row)] for row in tree.ancestors.tolist()
    ]


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
    assert (shape.level_sizes, shape.size, shape.depth) == (levels, len(parents), len(widths))


@pytest.mark.parametrize("seed", range(20))
def test_attention_rows_are_slices_of_one_table(seed):
    rng = random.Random(seed)
    parents = list(range(-1, 11)) if seed % 4 == 0 else random_parents(rng, 12)
    attention = TreeAttention(8, 12, "cpu", torch.float32)
    attention.set_tree(ancestor_mask(torch.tensor(parents)), chain=seed % 4 == 0)
    storage = attention.table.untyped_storage().data_ptr()
    for _ in range(50):
        n, nodes = rng.randrange(1, 31), rng.randrange(13)
        end = n + nodes
        start = rng.choice([0, rng.randrange(max(0, n - 8), end)])
        positions, mask = attention.span(n, start, end)
        depths = [len(path_of(parents, node)) - 1 for node in range(nodes)]
        expected = [*range(n), *(n + depth for depth in depths)][start:end]
        assert (
            list(range(start, end)) == expected
            if positions is None
            else positions.tolist() == expected
        )
        allowed = torch.zeros(end, end, dtype=torch.bool)
        for i in range(n):
            allowed[i, : i + 1] = True
        for node in range(nodes):
            allowed[n + node, [*range(n), *(n + other for other in path_of(parents, node))]] = True
        causal = torch.ones(end, end, dtype=torch.bool).tril()
        if mask is None:
            assert torch.equal(allowed[start:end], causal[start:end])
        else:
            rows, columns = mask.shape
            first = end - rows
            assert first == (start or n) and torch.equal(allowed[start:first], causal[start:first])
            assert allowed[first:, : end - columns].all()
            assert torch.equal(mask == 0, allowed[first:, end - columns :])
            assert (mask[mask != 0] == -torch.inf).all()
            assert mask.untyped_storage().data_ptr() == storage  # a view, not a copy


@pytest.mark.parametrize(
    "widths", [(1,) * 8, (4, 2, 2, 1), (2, 4, 3, 1, 1), (6, 1, 1, 1, 1, 1), (3, 3, 3)]
)
def test_a_draft_that_stops_early_is_a_leading_slice(widths):
    """The dynamic sliced mask: the table of the whole shape, cut, is the table built for the small tree directly."""
    whole = TreeAttention(20, KConfig(widths).size, "cpu", torch.float32)
    whole.set_tree(ancestor_mask(KConfig(widths).parents()))
    for levels in range(1, len(widths) + 1):
        shape = KConfig(widths[:levels])
        small = TreeAttention(20, shape.size, "cpu", torch.float32)
        small.set_tree(ancestor_mask(shape.parents()))
        assert torch.equal(shape.parents(), KConfig(widths).parents()[: shape.size])
        for n in (1, 7, 20):
            for start in {0, n - 1, n, n + shape.size - 1}:
                for sliced, direct in zip(
                    whole.span(n, start, n + shape.size), small.span(n, start, n + shape.size)
                ):
                    assert (sliced is direct is None) or torch.equal(sliced, direct)


def chain_logits(model, context, tree, node):
    """Cache-free causal logits after the context and the path to ``node``."""
    path = path_of(tree.parents.tolist(), node)
    return model(torch.cat((context, tree.tokens[path][None]), dim=1))[0, -1]


@pytest.mark.parametrize("seed", range(25))
def test_target_sees_every_node_as_the_end_of_a_chain(seed):
    """Eight trees in a row, duplicated siblings among them, each built on what the roll-back before it left."""
    rng, model = random.Random(seed), random_llama(seed % 4)
    context = torch.randint(0, 61, (1, rng.randrange(1, 12)))
    cache, attention = model.new_cache(120), TreeAttention(100, 20, "cpu", model.dtype)
    for _ in range(8):
        tree = random_tree(rng, rng.randrange(1, 20))
        attention.set_tree(tree.ancestors)
        logits = _score(model, context, tree, attention, cache, None)
        assert len(logits) == len(tree) + 1
        assert (logits[0] - model(context)[0, -1]).abs().max() < 1e-10
        for node in range(len(tree)):
            assert (logits[node + 1] - chain_logits(model, context, tree, node)).abs().max() < 1e-10
        path = path_of(tree.parents.tolist(), rng.randrange(-1, len(tree)))
        cache.keep(context.shape[1], path)
        extra = torch.randint(0, 61, (1, 1))
        context = torch.cat((context, tree.tokens[path][None], extra), dim=1)


def random_tree(rng, size):
    tokens = torch.tensor(
        [rng.randrange(4) for _ in range(size)]
    )  # few tokens, so that siblings are often equal
    return TokenTree(tokens, torch.tensor(random_parents(rng, size)))


def test_a_lone_place_that_sees_everything_needs_no_mask():
    attention = TreeAttention(9, 4, "cpu", torch.float32)
    assert attention.span(5, 4, 5)[1] is None and attention.span(5, 5, 6)[1] is None
    assert attention.span(5, 6, 7)[1] is not None


def test_no_tensor_grows_with_the_square_of_the_context(monkeypatch):
    """The largest tensor that decoding makes, for four times the context: the caches', four times as large.

    The draft's second segment first runs behind 200 and 1,000 tokens of context, the third far behind both.
    """
    monkeypatch.setattr(draft, "WINDOW", 32)
    largest = {}
    for length in (256, 1024):
        options = dict(eos_token_ids=(), max_position_embeddings=2 * length, num_hidden_layers=3)
        target, drafter = (
            random_llama(0, **options),
            random_llama(1, **options, exit_layers=(1, 2, 3)),
        )
        prompt = torch.randint(
            0, 61, (length - 40,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        expected = generate(target, prompt, method="ar", max_new_tokens=30).tokens
        for method in ("s2d", "s2d-tree"):
            with LargestTensor() as seen:
                output = generate(
                    target,
                    prompt,
                    draft=drafter,
                    method=method,
                    thresholds=(0.3, 0.4, 0.0),
                    max_new_tokens=30,
                )
            assert output.tokens == expected
            largest[method, length] = seen.largest
    for method in ("s2d", "s2d-tree"):
        assert largest[method, 1024] <= 4.2 * largest[method, 256]


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of a tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        sizes = [
            t.numel()
            for t in (result if isinstance(result, tuple | list) else [result])
            if isinstance(t, torch.Tensor)
        ]
        self.largest = max(self.largest, *sizes, 0)
        return result
