"""The verifiers: every outcome enumerated, and mistakes that are well known must show."""

from functools import partial

import pytest
import torch
from enumeration import joint_distribution, joint_of
from helpers import random_distribution, random_model

from s2d.rules import Rejection, residual
from s2d.sampling import warp
from s2d.tree import Tree

SOFTMAX = partial(warp, temperature=1.0)


def error_of(widths, zeros, seed, vocab=3):
    """How far what a step emits, whose tree is drawn from q, is from p's own distribution."""
    p, q = random_model(seed, vocab, zeros), random_model(seed + 100, vocab, zeros)
    length = min(len(widths) + 1, 3)

    def emit(draws):
        rule = Rejection(SOFTMAX, draws)
        tree = Tree([0])
        for width in widths:
            nodes = tree.leaves(0.0)
            rows = torch.stack([q(tuple(tree.path(node))) for node in nodes])
            drawn = rule.propose(tree, nodes, rows.log(), width)
            assert all(len({*row}) == len(row) for row in drawn.tokens)
            tree.add_level(nodes, drawn, exit_layer=1)
        paths = [tuple(tree.path(node)) for node in range(len(tree.tokens))]
        logits = torch.stack([p(path) for path in paths]).log()
        accepted, bonus = rule.verify(tree, logits)
        return [*(tree.tokens[node] for node in accepted), bonus]

    return (joint_of(emit, p, length) - joint_distribution(p, length)).abs().max().item()


@pytest.mark.parametrize("widths", [(1, 1, 1), (3,), (2, 2), (1, 2)])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_drawn_chains_and_trees_leave_the_targets_distribution(widths, zeros):
    """Also where q has fewer tokens than a node has children."""
    for seed in range(2):
        assert error_of(widths, zeros=zeros, seed=seed) < 1e-12


def test_where_rounding_leaves_no_residual_p_itself_is_drawn_from():
    p = random_distribution(torch.Generator().manual_seed(1), 9)
    assert residual(p, p) is p
