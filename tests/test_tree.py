"""Token trees: masks, positions and slices against slow and obvious versions; every node equals its own chain."""

import random

import pytest
import torch
from helpers import random_llama, random_parents

from s2d.decode import _score
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
    leaves = [path for node, path in enumerate(paths) if node not in parents]
    assert [[node for node in row if node >= 0] for row in tree.paths().tolist()] == leaves
    n = rng.randrange(len(parents) + 1)
    assert torch.equal(tree[:n].ancestors, tree.ancestors[:n, :n])
    assert tree[:n].tokens.tolist() == list(range(100, 100 + n))


def test_pretty_shows_the_example_of_the_docstring():
    tree = TokenTree(torch.tensor([7, 8, 9, 10, 11]), torch.tensor([-1, -1, 0, 0, 2]))
    assert tree.pretty(decode="t{}".format).splitlines() == [
        "  0  -1  x . . . .  t7",
        "  1  -1  . x . . .  t8",
        "  2   0  x . x . .    t9",
        "  3   0  x . . x .    t10",
        "  4   2  x . x . x      t11",
    ]
    rows = [line.split()[-5:] for line in ancestor_mask.__doc__.splitlines() if line.endswith((" .", " 4"))]
    assert rows == [[str(j) if seen else "." for j, seen in enumerate(row)] for row in tree.ancestors.tolist()]


@pytest.mark.parametrize("widths", [(1, 1, 1), (4, 2, 2, 1), (3, 1, 1, 1), (2, 4, 3, 1, 1), (5,), ()])
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
    parents = random_parents(rng, 12)
    attention = TreeAttention(30, 12, "cpu", torch.float32)
    attention.set_tree(ancestor_mask(torch.tensor(parents)))
    storage = attention.mask.untyped_storage().data_ptr()
    for _ in range(30):
        n, nodes = rng.randrange(1, 31), rng.randrange(13)
        end = n + nodes
        start = rng.randrange(end)
        positions, mask = attention.rows(n, start, end)
        depths = [len(path_of(parents, node)) - 1 for node in range(nodes)]
        assert positions.tolist() == [*range(n), *(n + depth for depth in depths)][start:end]
        allowed = torch.zeros(end, end, dtype=torch.bool)
        for i in range(n):
            allowed[i, : i + 1] = True
        for node in range(nodes):
            allowed[n + node, [*range(n), *(n + other for other in path_of(parents, node))]] = True
        if mask is None:
            assert allowed[start:end].all()
        else:
            assert torch.equal(mask == 0, allowed[start:end]) and (mask[~allowed[start:end]] == -torch.inf).all()
            assert mask.untyped_storage().data_ptr() == storage  # a view, not a copy


@pytest.mark.parametrize("widths", [(1,) * 8, (4, 2, 2, 1), (2, 4, 3, 1, 1), (6, 1, 1, 1, 1, 1), (3, 3, 3)])
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
                for sliced, direct in zip(whole.rows(n, start, n + shape.size), small.rows(n, start, n + shape.size)):
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
    tokens = torch.tensor([rng.randrange(4) for _ in range(size)])  # few tokens, so that siblings are often equal
    return TokenTree(tokens, torch.tensor(random_parents(rng, size)))


def test_a_lone_place_that_sees_everything_needs_no_mask():
    attention = TreeAttention(9, 4, "cpu", torch.float32)
    assert attention.rows(5, 4, 5)[1] is None and attention.rows(5, 5, 6)[1] is None
    assert attention.rows(5, 6, 7)[1] is not None


