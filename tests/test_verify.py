"""The verifiers are exact: their output distribution, by enumeration of every outcome, is the target's."""

import itertools

import pytest
import torch

from s2d.sampling import Sampler, warp
from s2d.verify import verify_greedy, verify_sampled

V = 4


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


class EveryOutcome:
    """Stands in for Sampler: replays one sequence of choices, and tells how likely it is and what comes next."""

    def __init__(self, choices):
        self.choices, self.taken, self.chance = list(choices), [], 1.0
        self.untried = []

    def _choose(self, chances):
        """Take the next choice among outcomes with these chances; at a fork not met before, the first possible one."""
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        at = len(self.taken)
        if at == len(self.choices):
            self.choices.append(possible[0])
            self.untried += [[*self.choices[:at], other] for other in possible[1:]]
        self.taken.append(self.choices[at])
        self.chance *= chances[self.choices[at]]
        return self.choices[at]

    def flip(self, chances):
        return torch.tensor([self._choose([1 - c, c]) == 1 for c in chances.tolist()], dtype=torch.bool)

    def draw(self, probs):
        return torch.tensor(self._choose(probs.tolist()))


def enumerate_outcomes(function):
    """Yield (result, chance) of function(sampler) for every way chance can fall."""
    waiting = [[]]
    while waiting:
        sampler = EveryOutcome(waiting.pop())
        result = function(sampler)
        waiting += sampler.untried
        yield result, sampler.chance


def random_distribution(generator, shape, zeros=0.0):
    weights = torch.rand(shape, dtype=torch.float64, generator=generator) ** 3
    weights[torch.rand(shape, generator=generator) < zeros] = 0
    weights[..., 0] += 1e-3 * (weights.sum(-1) == 0)
    return weights / weights.sum(-1, keepdim=True)


def cases():
    generator = torch.Generator().manual_seed(0)
    for zeros in (0.0, 0.5):
        for number in range(5):
            yield f"random-{zeros}-{number}", random_distribution(generator, V, zeros), random_distribution(generator, V, zeros)
    p = random_distribution(generator, V)
    one_hot = torch.eye(V, dtype=torch.float64)
    yield "equal", p, p.clone()
    yield "disjoint", double(0.3, 0.7, 0, 0), double(0, 0, 0.5, 0.5)
    yield "one-hot p", one_hot[2], p
    yield "one-hot q", p, one_hot[1]
    yield "same one-hot", one_hot[1], one_hot[1]
    yield "q hides p's favourite", double(0.9, 0.05, 0.05, 0), double(0, 0.5, 0.25, 0.25)


@pytest.mark.parametrize(("p", "q"), [case[1:] for case in cases()], ids=[case[0] for case in cases()])
def test_one_draft_token_leaves_the_targets_distribution(p, q):
    output = torch.zeros(V, dtype=torch.float64)
    rows = torch.stack([p, torch.full_like(p, 1 / V)])  # the row after the draft token cannot matter for the first
    for x in range(V):
        for (accepted, extra), chance in enumerate_outcomes(
            lambda sampler: verify_sampled(rows, q[None], torch.tensor([x]), sampler) if q[x] > 0 else (0, 0)
        ):
            output[x if accepted else int(extra)] += q[x] * chance
    assert (output - p).abs().max() < 1e-9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_chain_leaves_the_targets_joint_distribution(seed, zeros):
    """Two draft tokens whose distributions depend on what came before; three emitted tokens p(x) p(y|x) p(z|xy)."""
    vocab, generator = 3, torch.Generator().manual_seed(seed)
    p1, q1 = random_distribution(generator, vocab, zeros), random_distribution(generator, vocab, zeros)
    p2, q2 = random_distribution(generator, (vocab, vocab), zeros), random_distribution(generator, (vocab, vocab), zeros)
    p3 = random_distribution(generator, (vocab, vocab, vocab), zeros)
    joint = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for x, y in itertools.product(range(vocab), repeat=2):
        drafted = q1[x] * q2[x, y]
        if drafted == 0:
            continue
        rows = torch.stack([p1, p2[x], p3[x, y]])
        q = torch.stack([q1, q2[x]])
        for (accepted, extra), chance in enumerate_outcomes(
            lambda sampler: verify_sampled(rows, q, torch.tensor([x, y]), sampler)
        ):
            emitted = [x, y][:accepted] + [int(extra)]
            # Tokens the step did not reach come from the target in later steps.
            later = torch.ones(vocab, vocab, dtype=torch.float64)
            if len(emitted) == 1:
                later = p2[emitted[0]][:, None] * p3[emitted[0]]
                joint[emitted[0]] += drafted * chance * later
            elif len(emitted) == 2:
                joint[emitted[0], emitted[1]] += drafted * chance * p3[emitted[0], emitted[1]]
            else:
                joint[emitted[0], emitted[1], emitted[2]] += drafted * chance
    assert (joint - p1[:, None, None] * p2[:, :, None] * p3).abs().max() < 1e-9


def test_the_enumeration_notices_a_wrong_verifier():
    """The harness has teeth: accepting without the residual, or testing argmax drafts against softmax q, is caught."""
    p, q = double(0.6, 0.3, 0.1, 0), double(0.1, 0.2, 0.3, 0.4)

    def no_residual(sampler, x):
        kept = sampler.flip((p[x] / q[x]).clamp(max=1)[None])[0]
        return x if kept else int(sampler.draw(p))

    output = torch.zeros(V, dtype=torch.float64)
    for x in range(V):
        for token, chance in enumerate_outcomes(lambda sampler: no_residual(sampler, x)):
            output[token] += q[x] * chance
    assert (output - p).abs().max() > 0.01

    best = q.argmax()
    output = torch.zeros(V, dtype=torch.float64)
    rows = torch.stack([p, p])
    for (accepted, extra), chance in enumerate_outcomes(lambda s: verify_sampled(rows, q[None], best[None], s)):
        output[best if accepted else int(extra)] += chance
    assert (output - p).abs().max() > 0.01


def test_greedy_keeps_the_matching_prefix_and_adds_the_next_argmax():
    best = torch.tensor([3, 1, 2, 0])
    logits = torch.nn.functional.one_hot(best, V).double()
    for drafted, accepted in (([3, 1, 2], 3), ([3, 1, 0], 2), ([3, 0, 2], 1), ([0, 1, 2], 0)):
        kept, extra = verify_greedy(logits, torch.tensor(drafted))
        assert (kept, int(extra)) == (accepted, best[accepted])
    kept, extra = verify_greedy(logits[:1], torch.tensor([], dtype=torch.long))
    assert (kept, int(extra)) == (0, 3)


def test_warp_by_hand():
    probs = double(0.5, 0.3, 0.15, 0.05)
    logits = probs.log()
    assert torch.allclose(warp(logits, 1.0), probs)
    assert torch.allclose(warp(logits, 0.5), probs**2 / (probs**2).sum())
    for top_p, kept in ((0.4, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4), (1.0, 4)):
        expected = torch.where(torch.arange(V) < kept, probs, 0.0)
        assert torch.allclose(warp(logits, 1.0, top_p), expected / expected.sum()), top_p
    shuffled = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(warp(logits[shuffled], 1.0, 0.7), warp(logits, 1.0, 0.7)[shuffled])


def test_sampler_repeats_with_its_seed():
    chances, probs = torch.full((50,), 0.5), torch.full((100,), 0.01)
    first, again, other = (Sampler(seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(first.flip(chances), again.flip(chances))
    assert first.draw(probs) == again.draw(probs)
    assert not torch.equal(Sampler(1, "cpu").flip(chances), other.flip(chances))
    assert not first.flip(torch.zeros(50)).any() and first.flip(torch.ones(50)).all()
