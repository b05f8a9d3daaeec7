"""The exactness tests have teeth: mistakes found in published decoders are caught by the same enumeration.

The wrong verifiers live here only. Each is run through ``emitted_distribution`` exactly as the right ones are.
"""

import torch
from enumeration import emitted_distribution, random_distribution
from test_tune import Reckless, error_of

from s2d.tree import TokenTree
from s2d.verify import residual, verify_sampled, without

P = random_distribution(torch.Generator().manual_seed(1), 4)
Q = random_distribution(torch.Generator().manual_seed(2), 4)


def error(decide, k, q=Q, replacement=False):
    """How far the first token's distribution is from P."""
    return (
        (emitted_distribution(lambda _: P, lambda _: q, (k,), 1, decide, replacement) - P)
        .abs()
        .max()
        .item()
    )


def right(tree, p, q, sampler):
    return verify_sampled(tree, p, q, False, sampler)


def test_the_right_verifier_passes_here():
    assert error(right, 1) < 1e-9 and error(right, 3) < 1e-9


def test_argmax_drafts_tested_against_softmax_are_caught():
    def wrong(tree, p, q, sampler):
        return right(tree, p, Q.expand_as(p), sampler)

    always_argmax = torch.nn.functional.one_hot(Q.argmax(), 4).double()
    assert error(wrong, 1, q=always_argmax) > 0.01
    assert (
        error(right, 1, q=always_argmax) < 1e-9
    )  # the one-hot is what such a draft was drawn from


def test_candidates_reordered_by_probability_are_caught():
    def wrong(tree, p, q, sampler):
        order = q[0][tree.tokens].argsort(descending=True)
        path, extra, _ = right(TokenTree(tree.tokens[order], tree.parents), p, q, sampler)
        return order[path].tolist(), extra

    assert error(wrong, 2) > 0.01
    assert error(wrong, 3) > 0.01


def test_dropping_unlikely_candidates_is_caught():
    def wrong(tree, p, q, sampler):
        likely = tree.tokens != Q.argmin()
        path, extra, _ = right(TokenTree(tree.tokens[likely], tree.parents[likely]), p, q, sampler)
        return likely.nonzero().flatten()[path].tolist(), extra

    assert error(wrong, 2) > 1e-4


def recursive_rejection(tree, p, q, sampler, next_p, next_q):
    """One level of recursive rejection sampling with its two updates given."""
    rest_p, rest_q = p[0], q[0]
    for node, token in enumerate(tree.tokens):
        if sampler.flip(rest_p[token] / rest_q[token])[0]:
            return [node], 0
        rest_p, rest_q = next_p(rest_p, rest_q), next_q(rest_q, token)
    return [], sampler.draw(rest_p[None])[0]


def test_q_not_renormalised_after_a_candidate_is_caught():
    def wrong(tree, p, q, sampler):
        return recursive_rejection(
            tree, p, q, sampler, residual, lambda q, token: q.index_fill(0, token, 0.0)
        )

    def as_it_should_be(tree, p, q, sampler):
        return recursive_rejection(tree, p, q, sampler, residual, without)

    assert error(wrong, 2) > 0.01
    assert error(as_it_should_be, 2) < 1e-9


def test_q_left_as_it_was_though_drawn_without_replacement_is_caught():
    assert error(lambda tree, p, q, sampler: verify_sampled(tree, p, q, True, sampler), 2) > 0.01


def test_a_rejection_without_a_residual_is_caught():
    def wrong(tree, p, q, sampler):
        return recursive_rejection(tree, p, q, sampler, lambda p, q: p, without)

    assert error(wrong, 1) > 0.01


class Drops(Reckless):
    """Breaks the rule: a drawn token is not sent where the draft finds another likelier."""

    def send(self):
        order, plan = super().send()
        last = self.levels[order[-1]] if self.drawn and order else None
        return order[:-1] if last and last.drawn != last.visits[-1].tokens[0] else order, plan


def test_a_policy_that_drops_what_was_drawn_is_caught(monkeypatch):
    """With p = q = (0.7, 0.3) it turns 0.3 into 0.09; sent or not by what is known before the draw, all is well."""
    flat = torch.tensor([0.7, 0.3], dtype=torch.float64)

    def drop(tree, p, q, sampler):
        return right(tree[: int(q[0][tree.tokens[0]] > 0.5)], p, q, sampler)

    def decide_before(tree, p, q, sampler):
        return right(tree[: int(q[0].max() > 0.5)], p, q, sampler)

    found = emitted_distribution(lambda _: flat, lambda _: flat, (1,), 1, drop)
    assert torch.allclose(found, torch.tensor([0.91, 0.09], dtype=torch.float64))
    assert torch.allclose(
        emitted_distribution(lambda _: flat, lambda _: flat, (1,), 1, decide_before), flat
    )
    assert max(error_of(Drops, salt, None, 2, monkeypatch)[0] for salt in range(6)) > 1e-3
    assert max(error_of(Reckless, salt, None, 2, monkeypatch)[0] for salt in range(6)) < 1e-9
