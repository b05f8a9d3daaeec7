"""The verifiers: every outcome enumerated, and mistakes that are well known must show."""

import pytest
import torch
from enumeration import joint_distribution, joint_of
from helpers import random_distribution, random_model

from s2d.verify import residual, verify_chain, verify_sampled


def error_of(widths, decide=verify_sampled, zeros=0.0, vocab=3, seed=1, change=None):
    """How far what a step emits, whose tree is drawn from q, is from p's own distribution.

    ``change(tokens, q)`` returns other tokens for those that were drawn.
    """
    p, q = random_model(seed, vocab, zeros), random_model(seed + 100, vocab, zeros)
    length = min(len(widths) + 1, 3)

    def emit(sampling):
        paths, parents, above = [()], [], [-1]
        for width in widths:
            rows = torch.stack([q(paths[node + 1]) for node in above])
            first, drawn = len(parents), sampling.candidates(rows, width).tolist()
            for node, children in zip(above, drawn):
                parents += [node] * width
                paths += [(*paths[node + 1], token) for token in children]
            above = range(first, len(parents))
        tokens = [path[-1] for path in paths[1:]]
        if change is not None:
            tokens = change(tokens, q(()))
        p_rows, q_rows = (torch.stack([model(path) for path in paths]) for model in (p, q))
        accepted, bonus = decide(tokens, parents, p_rows, q_rows, sampling)
        return [*(tokens[node] for node in accepted), bonus]

    return (joint_of(emit, p, length) - joint_distribution(p, length)).abs().max().item()


@pytest.mark.parametrize("widths", [(1,), (1, 1), (2,), (3,), (2, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_sampled_trees_leave_the_targets_distribution(widths, zeros):
    """Also where q has fewer tokens than a node has children."""
    for seed in range(2):
        assert error_of(widths, zeros=zeros, seed=seed) < 1e-12


def chain(tokens, parents, p, q, sampling):
    return verify_chain(tokens, p, q, sampling)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_chains_leave_the_targets_distribution(length, zeros):
    for seed in range(3):
        assert error_of((1,) * length, chain, zeros=zeros, seed=seed) < 1e-12


def shows(widths, **options):
    """Whether a mistake changes what is emitted after one of several models."""
    return max(error_of(widths, vocab=4, seed=seed, **options) for seed in range(8)) > 0.001


def test_tests_against_what_tokens_were_not_drawn_from_show():
    """A softmax for its argmax."""
    assert shows((1,), change=lambda tokens, q: [q.argmax().item()])


def test_sorting_drawn_candidates_shows():
    assert shows((3,), change=lambda tokens, q: sorted(tokens, key=lambda token: -q[token]))


def test_dropping_drawn_candidates_shows():
    def drop(tokens, parents, p, q, sampling):
        kept = [token for token in tokens if q[0, token] > 0.2]
        return verify_sampled(kept, [-1] * len(kept), p, q, sampling)

    assert shows((2,), decide=drop)


@pytest.mark.parametrize(
    ("name", "wrong", "widths"),
    [
        # The bonus token is drawn from all of p.
        ("residual", lambda p, q: p, (1,)),
        # A rejected candidate stays in q; or q sums to less than 1 without it.
        ("without", lambda q, token: q, (2,)),
        ("without", lambda q, token: q.index_fill(0, torch.tensor(token), 0.0), (2,)),
    ],
)
def test_a_wrong_rest_of_p_or_q_shows(name, wrong, widths, monkeypatch):
    monkeypatch.setattr(f"s2d.verify.{name}", wrong)
    assert shows(widths)


def test_where_rounding_leaves_no_residual_p_itself_is_drawn_from():
    p = random_distribution(torch.Generator().manual_seed(1), 9)
    assert residual(p, p) is p
