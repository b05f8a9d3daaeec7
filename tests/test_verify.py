"""The verifiers: every outcome enumerated, and mistakes that are well known must show."""

import pytest
import torch
from enumeration import joint_distribution, joint_of
from helpers import random_distribution, random_model

from s2d.tree import KConfig, ancestor_mask
from s2d.verify import follow, residual, verify_chain, verify_sampled, without

SHAPES = [(1,), (1, 1), (2,), (3,), (2, 1), (2, 2), (1, 2)]


def parents_of(widths):
    parents, above = [], [-1]
    for width in widths:
        first = len(parents)
        parents += [node for node in above for _ in range(width)]
        above = range(first, len(parents))
    return parents


def emitted(p, q, widths, length, decide, change=lambda tokens, parents, q: tokens):
    """The joint distribution of what a step emits, whose tree is drawn from q."""
    parents = parents_of(widths)

    def emit(make):
        sampling = make(*ANY)
        prefixes = level = [()]
        for width in widths:
            rows = torch.stack([q(prefix) for prefix in level])
            drawn = sampling.candidates(rows, width).tolist()
            level = [(*prefix, x) for prefix, row in zip(level, drawn) for x in row]
            prefixes = prefixes + level
        rows_p, rows_q = (torch.stack([m(prefix) for prefix in prefixes]) for m in (p, q))
        tokens = change([prefix[-1] for prefix in prefixes[1:]], parents, q)
        path, bonus = decide(tokens, parents, rows_p, rows_q, sampling)
        return [*(tokens[node] for node in path), bonus]

    return joint_of(emit, p, length)


ANY = (type("Options", (), {"temperature": 1.0}), None)


def error_of(widths, decide, zeros=0.0, vocab=3, seed=1, **options):
    """How far what is emitted is from p's own distribution."""
    p, q = random_model(seed, vocab, zeros), random_model(seed + 100, vocab, zeros)
    length = min(len(widths) + 1, 3)
    found = emitted(p, q, widths, length, decide, **options)
    return (found - joint_distribution(p, length)).abs().max().item()


@pytest.mark.parametrize("widths", SHAPES)
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_sampled_trees_leave_the_targets_distribution(widths, zeros):
    """Also where q has fewer tokens than a node has children."""
    for seed in range(2):
        assert error_of(widths, verify_sampled, zeros=zeros, seed=seed) < 1e-12


@pytest.mark.parametrize("length", [1, 2, 3])
def test_chains_leave_the_targets_distribution(length):
    def decide(tokens, parents, p, q, sampling):
        return verify_chain(tokens, p, q, sampling)

    for seed in range(3):
        for zeros in (0.0, 0.5):
            assert error_of((1,) * length, decide, zeros=zeros, seed=seed) < 1e-12


def shows(widths, decide):
    """Whether a mistake changes what is emitted after one of several models."""
    return max(error_of(widths, decide, vocab=4, seed=seed) for seed in range(8)) > 0.001


def patched(name, function):
    """verify_sampled with one of its parts replaced."""

    def decide(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("s2d.verify." + name, function)
            return verify_sampled(*arguments)

    return decide


def test_tests_against_what_tokens_were_not_drawn_from_show():
    """A softmax for its argmax."""

    def argmax(tokens, parents, q):
        return [q(()).argmax().item()]

    assert error_of((1,), verify_sampled, change=argmax) > 0.01


def test_sorting_drawn_candidates_shows():
    def sort(tokens, parents, q):
        return sorted(tokens, key=lambda token: -q(())[token])

    assert error_of((3,), verify_sampled, change=sort) > 0.001


def test_dropping_drawn_candidates_shows():
    def drop(tokens, parents, p, q, sampling):
        kept = [token for token in tokens if q[0, token] > 0.2]
        return verify_sampled(kept, [-1] * len(kept), p, q, sampling)

    assert shows((2,), drop)


def test_a_bonus_token_without_the_residual_shows():
    assert error_of((1,), patched("residual", lambda p, q: p)) > 0.01


def test_a_candidate_left_in_q_shows():
    assert shows((2,), patched("without", lambda q, token: q))


def test_q_that_is_not_normalised_shows():
    def zeroed(q, token):
        return q.index_fill(0, torch.tensor(token), 0.0)

    assert shows((2,), patched("without", zeroed))


def test_shared_noise_together_with_a_test_shows():
    """With one noise for draft and residual, min(1, p / q) no longer leaves p."""
    generator = torch.Generator().manual_seed(0)
    p, q = (random_distribution(generator, 4) for _ in range(2))
    noise = torch.empty(200_000, 4, dtype=torch.float64).exponential_(generator=generator)
    drafted = (q / noise).argmax(dim=-1)
    uniform = torch.rand(len(noise), generator=generator, dtype=torch.float64)
    rejected = (residual(p, q) / noise).argmax(dim=-1)
    tokens = torch.where(uniform < p[drafted] / q[drafted], drafted, rejected)
    assert (tokens.bincount(minlength=4) / len(tokens) - p).abs().max() > 0.01
    coupled = (p / noise).argmax(dim=-1)
    assert (coupled.bincount(minlength=4) / len(tokens) - p).abs().max() < 0.005


def test_follow_walks_to_the_targets_choices():
    """Against a search among all paths."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        parents = parents_of((3, 2, 1))
        tokens = torch.randint(3, (len(parents),), generator=generator).tolist()
        choices = torch.randint(3, (len(parents) + 1,), generator=generator)
        path, bonus = follow(tokens, parents, choices)
        above = [-1, *path]
        assert all(parents[node] == before for node, before in zip(path, above))
        assert all(tokens[node] == choices[before + 1] for node, before in zip(path, above))
        children = [tokens[i] for i, parent in enumerate(parents) if parent == above[-1]]
        assert bonus == choices[above[-1] + 1] and bonus not in children


def test_residuals():
    generator = torch.Generator().manual_seed(1)
    p, q = (random_distribution(generator, 9) for _ in range(2))
    torch.testing.assert_close(residual(p, q), (p - q).relu() / (p - q).relu().sum())
    assert residual(p, p) is p  # only rounding leads there
    rest = without(q, 4)
    assert rest[4] == 0 and rest.sum() == pytest.approx(1.0)
    assert without(torch.tensor([0.0, 1.0]), 1).sum() == 0


def test_shapes_are_those_of_the_trees():
    for widths in SHAPES:
        assert (KConfig(widths).ancestors == ancestor_mask(parents_of(widths))).all()
