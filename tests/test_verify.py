"""The verifiers are exact: by enumeration of every outcome, their output has the target's law."""

from itertools import product

import pytest
import torch
from enumeration import emitted_distribution, joint_distribution, joint_of
from helpers import leading, random_distribution, random_model
from transformers.generation import logits_process

from s2d.sampling import Sampler, warp
from s2d.tree import TokenTree
from s2d.verify import follow, verify_chain, verify_sampled


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def sampled(replacement):
    return lambda tree, p, q, sampler: verify_sampled(tree, p, q, replacement, sampler)


def distributions(vocab, thorough):
    """Named pairs (p, q) over ``vocab`` tokens, random and adversarial."""
    generator, one_hot = torch.Generator().manual_seed(vocab), torch.eye(vocab, dtype=torch.float64)
    for zeros in (0.0, 0.5):
        for number in range(3 if thorough else 1):
            pair = [random_distribution(generator, vocab, zeros) for _ in "pq"]
            yield f"random-{zeros}-{number}", *pair
    p, half = random_distribution(generator, vocab), vocab // 2
    first, last = torch.zeros(2, vocab, dtype=torch.float64)
    first[:half] = random_distribution(generator, half)
    last[half:] = random_distribution(generator, vocab - half)
    yield "disjoint", first, last
    yield "q hides half of p", p, last
    yield "one-hot q", p, one_hot[1]
    if thorough:
        yield "equal", p, p.clone()
        yield "one-hot p", one_hot[2], p
        yield "same one-hot", one_hot[1], one_hot[1]
        yield "nearly equal", p, (p + 1e-12) / (p + 1e-12).sum()


CASES = [
    pytest.param(p, q, k, id=f"V={vocab} k={k} {name}")
    for vocab in (3, 4, 5, 6)
    for name, p, q in distributions(vocab, thorough=vocab < 5)
    for k in range(1, vocab + 1)
]


@pytest.mark.parametrize(("p", "q", "k"), CASES)
def test_candidates_leave_the_targets_distribution(p, q, k):
    """All 6^6 ordered draws of 6 tokens would take half a minute; a q with zeros has fewer."""
    for replacement in [False, True][: 2 if (q > 0).sum() ** k < 1000 else 1]:
        decide = sampled(replacement)
        output = emitted_distribution(lambda _: p, lambda _: q, (k,), 1, decide, replacement)
        assert (output - p).abs().max() < 1e-9


def pruned(replacement):
    """Nothing below token 1 is sent: decided by two drawn roots, before what is below is drawn."""

    def decide(tree, p_rows, q_rows, sampler):
        keep = torch.cat((torch.tensor([True, True]), tree.tokens[tree.parents[2:]] != 1))
        number = torch.cat((keep.cumsum(0) - 1, torch.tensor([-1])))
        small = TokenTree(tree.tokens[keep], number[tree.parents[keep]])
        rows = torch.cat((torch.tensor([True]), keep))
        path, bonus, _ = verify_sampled(small, p_rows[rows], q_rows[rows], replacement, sampler)
        return keep.nonzero().flatten()[path], bonus

    return decide


TWO_LEVELS = [
    *((3, (2, 2), False), (4, (2, 1), False), (3, (3, 1), False)),
    *((3, (2, 1), True), (3, (1, 2), True), (5, (1, 1), False)),
]


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize(("vocab", "widths", "replacement"), TWO_LEVELS)
def test_two_levels_leave_the_targets_pairs(vocab, widths, replacement, zeros):
    """p(x) p(y|x), with distributions that depend on what came before."""
    p, q = random_model(1, vocab, zeros), random_model(2, vocab, zeros)
    for decide in [sampled, pruned] if widths[0] == 2 else [sampled]:
        output = emitted_distribution(p, q, widths, 2, decide(replacement), replacement)
        assert (output - joint_distribution(p, 2)).abs().max() < 1e-9


@pytest.mark.parametrize("decide", [sampled(False), verify_chain])
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_leaves_the_targets_triples(seed, decide):
    """Two draft tokens, up to three emitted ones: p(x) p(y|x) p(z|xy)."""
    p, q = random_model(seed, 3, zeros=0.3), random_model(seed + 10, 3, zeros=0.3)
    output = emitted_distribution(p, q, (1, 1), 3, decide)
    assert (output - joint_distribution(p, 3)).abs().max() < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_a_deterministic_tree_leaves_the_targets_triples(seed):
    """Uneven, with twins: of equal siblings the one with more below it is not preferred."""
    p = random_model(seed, 3, zeros=0.3)
    tree = TokenTree(torch.tensor([0, 2, 0, 1, 2, 0]), torch.tensor([-1, -1, -1, 2, 2, 1]))
    prefixes = [(), (0,), (2,), (0,), (0, 1), (0, 2), (2, 0)]
    rows = torch.stack([p(prefix) for prefix in prefixes])

    def emit(sampler):
        path, bonus, _ = follow(tree, sampler.draw(rows))
        return *tree.tokens[path].tolist(), int(bonus)

    output = joint_of(emit, p, 3)
    assert (output - joint_distribution(p, 3)).abs().max() < 1e-9


def test_greedy_follows_the_argmax_and_adds_the_next_one():
    tree = TokenTree(torch.tensor([3, 1, 1, 0, 2, 2]), torch.tensor([-1, -1, 0, 0, 1, 2]))
    for best, path, bonus in (
        ([3, 1, 0, 2, 0, 0, 1], [0, 2, 5], 1),  # 3 1 2 and then 1
        ([3, 0, 0, 0, 2, 0, 0], [0, 3], 2),
        ([3, 2, 0, 0, 0, 0, 0], [0], 2),
        ([1, 0, 2, 0, 0, 3, 0], [1, 4], 3),
        ([2, 0, 0, 0, 0, 0, 0], [], 2),
    ):
        kept, added, _ = follow(tree, torch.tensor(best))
        assert (kept, int(added)) == (path, bonus)
    assert follow(leading(tree, 0), torch.tensor([3]))[:2] == ([], 3)


@pytest.mark.parametrize("ties", [False, True])
def test_warp_keeps_what_transformers_keeps(ties):
    """Top-k before top-p, whose part is of what top-k left; of equal logits top-k keeps all."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 40, dtype=torch.float64, generator=generator)
    logits, several = logits.round() if ties else logits, 0
    parts = (1.0,) if ties else (1.0, 0.6)  # which of equal ones top-p keeps is not said
    for temperature, top_k, top_p in product((0.5, 1.0, 3.0), (1, 3, 39, 99), parts):
        expected = logits
        for name, value in (("Temperature", temperature), ("TopK", top_k), ("TopP", top_p)):
            warper = getattr(logits_process, f"{name}LogitsWarper")(value)
            expected = warper(None, expected)
        found = warp(logits, temperature, top_p, top_k)
        torch.testing.assert_close(found, torch.softmax(expected, dim=-1))
        several += ((found > 0).sum(dim=-1) > top_k).sum().item()
    assert (several > 0) == ties


def test_sampler_repeats_with_its_seed():
    probs = torch.full((40, 100), 0.01)
    first, again, other = (Sampler(seed, "cpu") for seed in (1, 1, 2))

    def flips(sampler, probability):
        return sampler.flip(double(*[probability] * 50))[0].tolist()

    assert torch.equal(first.draw(probs), again.draw(probs))
    assert flips(first, 0.5) == flips(again, 0.5)
    assert torch.equal(first.candidates(probs, 5, False), again.candidates(probs, 5, False))
    assert not torch.equal(Sampler(1, "cpu").draw(probs), other.draw(probs))
    assert not any(flips(first, 0.0)) and all(flips(first, 1.0))


@pytest.mark.parametrize("replacement", [False, True])
def test_candidates_come_in_the_order_of_their_drawing(replacement):
    """20,000 ordered pairs against q(x) q(y) or q(x) q(y) / (1 - q(x)), within 6 deviations."""
    q, runs = double(0.5, 0.3, 0.15, 0.05), 20000
    pairs = Sampler(3, "cpu").candidates(q.expand(runs, 4), 2, replacement)
    expected = q[:, None] * q
    if not replacement:
        expected = (expected / (1 - q[:, None])).fill_diagonal_(0)
    counts = (4 * pairs[:, 0] + pairs[:, 1]).bincount(minlength=16).view(4, 4)
    assert ((counts - runs * expected).abs() <= 6 * (runs * expected * (1 - expected)).sqrt()).all()


def test_a_draw_reaches_rare_tokens_and_none_of_probability_0(monkeypatch):
    """With float32 sums the 1,000 rare tokens would add nothing to 0.5."""
    probs = torch.tensor([[0.0, 0.5, *[1e-9] * 1000, 0.0]])
    reached = (0.5 + 500.5e-9) / (0.5 + 1000e-9)
    for number, token in ((0.0, 1001), (1.0 - reached, 502), (1.0 - 2**-53, 1)):
        fill = lambda tensor, generator: tensor.fill_(number)  # noqa: B023, E731
        monkeypatch.setattr(torch.Tensor, "uniform_", fill)
        assert Sampler(0, "cpu").draw(probs).tolist() == [token]


def test_where_tokens_run_out_the_end_is_filled_with_others():
    q = double(0.0, 0.7, 0.0, 0.3).expand(50, 4)
    drawn = Sampler(0, "cpu").candidates(q, 4, replacement=False)
    assert (drawn.sort(dim=-1).values == torch.arange(4)).all()
    assert ((drawn[:, :2] == 1) | (drawn[:, :2] == 3)).all()
