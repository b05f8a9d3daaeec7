"""The exactness tests have teeth: the same enumeration catches mistakes of published decoders."""

import random
from functools import partial

import pytest
import torch
from enumeration import emitted_distribution, joint_distribution, joint_of, next_token_model
from helpers import leading, limit_to, random_distribution, random_llama, sorted_draft

from s2d import decode
from s2d.sampling import Sampling
from s2d.tree import Dynamic, KConfig, TokenTree
from s2d.verify import residual, verify_sampled, without

P = random_distribution(torch.Generator().manual_seed(1), 4)
Q = random_distribution(torch.Generator().manual_seed(2), 4)


def error(decide, k, q=Q, replacement=False):
    """How far the first token's distribution is from P."""
    found = emitted_distribution(lambda _: P, lambda _: q, (k,), 1, decide, replacement)
    return (found - P).abs().max().item()


def right(tree, p, q, sampler):
    return verify_sampled(tree, p, q, False, sampler)


def argmax_drafts_tested_against_softmax(tree, p, q, sampler):
    return right(tree, p, Q.expand_as(p), sampler)


def candidates_reordered_by_probability(tree, p, q, sampler):
    order = q[0][tree.tokens].argsort(descending=True)
    path, bonus, _ = right(TokenTree(tree.tokens[order], tree.parents), p, q, sampler)
    return order[path].tolist(), bonus


def a_table_that_has_seen_what_it_drafts(tree, p, q, sampler):
    """Had exit 0 counted the drafted token before q is asked for, q is not what it came from."""
    drafted = torch.nn.functional.one_hot(tree.tokens[:1], 4)
    return right(tree, p, 0.5 * q + 0.5 * drafted, sampler)


def unlikely_candidates_dropped(tree, p, q, sampler):
    likely = tree.tokens != Q.argmin()
    path, bonus, _ = right(TokenTree(tree.tokens[likely], tree.parents[likely]), p, q, sampler)
    return likely.nonzero().flatten()[path].tolist(), bonus


def recursive_rejection(tree, p, q, sampler, next_p=residual, next_q=without):
    """One level of recursive rejection sampling with its two updates given."""
    rest_p, rest_q = p[0], q[0]
    for node, token in enumerate(tree.tokens):
        if sampler.flip((rest_p[token] / rest_q[token])[None])[0]:
            return [node], 0
        rest_p, rest_q = next_p(rest_p, rest_q), next_q(rest_q, token)
    return [], sampler.draw(rest_p[None])[0]


def q_not_renormalised_after_a_candidate(*arguments):
    zeroed = lambda q, token: q.index_fill(0, token, 0.0)  # noqa: E731
    return recursive_rejection(*arguments, next_q=zeroed)


def q_left_as_it_was_though_drawn_without_replacement(tree, p, q, sampler):
    return verify_sampled(tree, p, q, True, sampler)


def a_rejection_without_a_residual(*arguments):
    return recursive_rejection(*arguments, next_p=lambda p, q: p)


ALWAYS_ARGMAX = torch.nn.functional.one_hot(Q.argmax(), 4).double()
WRONG = [
    (argmax_drafts_tested_against_softmax, 1, ALWAYS_ARGMAX, 0.01),
    (candidates_reordered_by_probability, 2, Q, 0.01),
    (candidates_reordered_by_probability, 3, Q, 0.01),
    (a_table_that_has_seen_what_it_drafts, 1, Q, 0.01),
    (unlikely_candidates_dropped, 2, Q, 1e-4),
    (q_not_renormalised_after_a_candidate, 2, Q, 0.01),
    (q_left_as_it_was_though_drawn_without_replacement, 2, Q, 0.01),
    (a_rejection_without_a_residual, 1, Q, 0.01),
]


@pytest.mark.parametrize(("decide", "k", "q", "least"), WRONG)
def test_a_mistake_is_caught(decide, k, q, least):
    """And the right verifier passes here: drafts of the argmax were drawn from the one-hot."""
    assert error(decide, k, q) > least
    assert error(right, k, q) < 1e-9 and error(recursive_rejection, k, q) < 1e-9


class Whim:
    """The worst that verify.py's lemma allows: a threshold and a stopping rule at once.

    Every answer depends on all that it was ever asked about, and on no reason at all.
    """

    reason, least = "policy", 0.0

    def __init__(self, salt):
        self.seen = [salt]

    def decide(self, *asked):
        self.seen += asked
        return random.Random(repr(self.seen)).random() > 0.5

    def __lt__(self, confidence):  # as a threshold: a token leaves at this exit
        return self.decide("exit", round(confidence, 9))

    def ends(self, tree, expanded, prediction, children):
        probs = prediction.probs.round(decimals=9).tolist()
        return self.decide(list(expanded), probs, children.tolist())


def whimsical(draft, shape, salt):
    whim = Whim(salt)
    return sorted_draft(draft, (1, 2), (whim, 0.0), shape, 20, whim)


class Drops:
    """A drafter that breaks the rule: it does not send the tokens it drew if one is unlikely."""

    exact = True

    def __init__(self, drafter):
        self.drafter, self.shape = drafter, drafter.shape
        self.verify, self.keep = drafter.verify, drafter.keep

    def propose(self, context, budget, sampling):
        proposal = self.drafter.propose(context, budget, sampling)
        tree = proposal.tree
        drawn = proposal.q[tree.parents + 1, tree.tokens] if len(tree) else tree.tokens
        proposal.tree = leading(tree, int((drawn > 0.4).cumprod(0).sum()))
        return proposal


def error_of(make_drafter, kept=None, length=3):
    """How far a generation is from the target's distribution; how its drafts ended, and where."""
    sizes = dict(vocab_size=3, scale=0.15, eos_token_ids=())
    target, draft = (random_llama(i, num_hidden_layers=i + 1, **sizes) for i in (0, 1))
    if kept is not None:
        limit_to(draft, kept)
    behaviours = set()

    def emit(sampler):
        sampling, tokens = Sampling(1.0, 1.0, False, sampler), []
        for step in decode(target, [2, 1], make_drafter(draft), sampling, 2 + length):
            proposal = step.proposal
            behaviours.add((*proposal.exits, proposal.depth, proposal.stopped))
            tokens += step.tokens
        return tokens

    p = next_token_model(target, [2, 1])
    found = joint_of(emit, p, length)
    return (found - joint_distribution(p, length)).abs().max().item(), behaviours


SHAPES = {"chain": KConfig((1, 1)), "fixed": KConfig((2, 1)), "growing": Dynamic(2, 2, 2)}


@pytest.mark.parametrize("kept", [None, torch.tensor([0, 2])])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_worst_policy_still_gives_the_targets_distribution(kept, shape):
    behaviours, salt, wanted = set(), 4, {"policy", 0, 1, 2}  # from salt 4 on all are soon seen
    while not wanted <= {each for how in behaviours for each in how[-2:]}:
        wrong, seen = error_of(partial(whimsical, shape=SHAPES[shape], salt=salt), kept)
        assert wrong < 1e-9 and salt < 20
        behaviours, salt = behaviours | seen, salt + 1
    assert {exit_layer for how in behaviours for exit_layer in how[:-2]} == {1, 2}


def test_dropping_what_was_drawn_is_caught():
    """Not sending a token for what it is changes p; for what is known before the draw, it may."""
    p, q = (torch.tensor(each, dtype=torch.float64) for each in ((0.7, 0.3), (0.5, 0.5)))

    def drop(tree, p, q, sampler):
        return right(leading(tree, int(tree.tokens[0] == 0)), p, q, sampler)

    def decide_before(tree, p, q, sampler):
        return right(leading(tree, int(q[0].max() > 0.5)), p, q, sampler)

    for decide, first in ((drop, 0.85), (decide_before, 0.7), (right, 0.7)):
        found = emitted_distribution(lambda _: p, lambda _: q, (1,), 1, decide)
        assert found.tolist() == pytest.approx([first, 1 - first])
    chain = lambda draft: sorted_draft(draft, (2,), (0.0,), KConfig((1, 1)), 20)  # noqa: E731
    assert error_of(lambda draft: Drops(chain(draft)))[0] > 1e-3
    assert error_of(chain)[0] < 1e-9
