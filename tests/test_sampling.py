"""What tokens are drawn from, and the draws themselves."""

from itertools import product

import pytest
import torch
from transformers.generation import logits_process

from s2d.sampling import Draws, Noise, warp


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
            expected = getattr(logits_process, f"{name}LogitsWarper")(value)(None, expected)
        found = warp(logits, temperature, top_p, top_k)
        torch.testing.assert_close(found, torch.softmax(expected, dim=-1))
        several += ((found > 0).sum(dim=-1) > top_k).sum().item()
    assert (several > 0) == ties


def test_candidates_come_in_the_order_of_their_draws():
    """20,000 ordered pairs against q(x) q(y) / (1 - q(x)), within 6 deviations; seeds repeat."""
    q, runs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64), 20000
    pairs = Draws(3).candidates(q.expand(runs, 4), 2)
    expected = (q[:, None] * q / (1 - q[:, None])).fill_diagonal_(0)
    counts = (4 * pairs[:, 0] + pairs[:, 1]).bincount(minlength=16).view(4, 4)
    assert ((counts - runs * expected).abs() <= 6 * (runs * expected * (1 - expected)).sqrt()).all()
    assert torch.equal(pairs, Draws(3).candidates(q.expand(runs, 4), 2))
    assert not torch.equal(pairs, Draws(4).candidates(q.expand(runs, 4), 2))
    draws = Draws(3)
    heads = sum(draws.flip(0.5) for _ in range(runs))
    assert abs(heads - runs / 2) < 6 * (runs / 4) ** 0.5


def test_a_draw_reaches_rare_tokens_and_none_of_probability_0(monkeypatch):
    """With float32 sums the 1,000 rare tokens would add nothing to 0.5."""
    probs = torch.tensor([[0.0, 0.5, *[1e-9] * 1000, 0.0]])
    draws = Draws(0)
    reached = (0.5 + 500.5e-9) / (0.5 + 1000e-9)
    for number, token in ((0.0, 1001), (1.0 - reached, 502), (1.0 - 2**-53, 1)):
        numbers = torch.tensor([number], dtype=torch.float64)
        monkeypatch.setattr(draws, "uniform", {1: numbers}.get)
        assert draws.draw(probs).tolist() == [token]


def test_every_bit_of_a_seed_counts():
    probs = torch.full((1, 1000), 1e-3).expand(8, 1000)
    for kind in (
        lambda seed: Draws(seed).draw(probs),
        lambda seed: Noise(seed, 1000, "cpu", torch.float64).at(list(range(8))).argmin(dim=-1),
    ):
        first = kind(7)
        assert torch.equal(kind(7), first)
        for other in (7 + 2**32, 7 + 2**40, 7 + 2**64):
            assert not torch.equal(kind(other), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_warped_in_float32(dtype):
    """Probabilities and their sums in half precision would lose most of a nucleus."""
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = warp(logits, 0.7, 0.9)
    assert found.dtype == torch.float32
    assert torch.equal(found, warp(logits.float(), 0.7, 0.9))


def test_noise_of_many_positions_is_found_again_until_it_is_forgotten():
    """Draft and target ask for the same rows, however many levels lie between."""
    noise = Noise(3, 50, "cpu", torch.float64)
    made = []
    make_row = noise.make_row
    noise.make_row = lambda position: made.append(position) or make_row(position)
    first = noise.at(list(range(10, 210)))
    assert torch.equal(noise.at(list(range(10, 210))), first) and made == list(range(10, 210))
    noise.forget(before=200)
    assert list(noise.rows) == list(range(200, 210))
    assert torch.equal(noise.at([11, 205]), first[[1, 195]])  # the same numbers, made anew
