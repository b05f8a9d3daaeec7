"""What tokens are drawn from, and the draws themselves."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from s2d.proof import law
from s2d.sampling import Distribution, Draws


@pytest.mark.parametrize("ties", [False, True])
def test_a_distribution_keeps_what_transformers_keeps(ties):
    """Top-k before top-p, whose part is of what top-k left; of equal logits top-k keeps all."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 40, dtype=torch.float64, generator=generator)
    logits, several = logits.round() if ties else logits, 0
    parts = (1.0,) if ties else (1.0, 0.6)  # which of equal ones top-p keeps is not said
    for temperature, top_k, top_p in product((0.5, 1.0, 3.0), (1, 3, 39, 99), parts):
        expected = logits
        for name, value in (("Temperature", temperature), ("TopK", top_k), ("TopP", top_p)):
            expected = getattr(logits_process, f"{name}LogitsWarper")(value)(None, expected)
        found = Distribution(temperature, top_p, top_k)(logits)
        torch.testing.assert_close(found, torch.softmax(expected, dim=-1))
        several += ((found > 0).sum(dim=-1) > top_k).sum().item()
    assert (several > 0) == ties


PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
RUNS = 20000


@pytest.mark.parametrize(
    "draw",
    [
        lambda draws, rows: draws.draw(rows)[:, None],
        lambda draws, rows: draws.candidates(rows, 2),
        lambda draws, rows: [[draws.flip(0.3)] for _ in rows],
        lambda draws, rows: (rows.log() + draws.noise(range(len(rows)), rows)).topk(2).indices,
    ],
)
def test_draws_are_as_frequent_as_they_are_probable(draw):
    """Within 6 standard deviations of their law, which everything that is enumerated rests on."""
    found = Counter(tuple(map(int, row)) for row in draw(Draws(3), PROBS.expand(RUNS, 4)))
    expected = law(lambda draws: draw(draws, PROBS[None])[0], points=512)
    for outcome, prob in expected.probs.items():
        deviation = (RUNS * prob * (1 - prob)) ** 0.5
        allowed = 6 * deviation + (0 if expected.enumerated else 0.01 * RUNS)
        assert abs(found[outcome] - RUNS * prob) < allowed
    assert found.keys() <= expected.probs.keys()


def test_a_draw_reaches_rare_tokens_and_none_of_probability_0():
    """With float32 sums the 1,000 rare tokens would add nothing to 0.5."""
    probs = torch.tensor([[0.0, 0.5, *[1e-9] * 1000, 0.0]])
    draws = Draws(0)
    reached = (0.5 + 500.5e-9) / (0.5 + 1000e-9)
    for number, token in ((0.0, 1001), (1.0 - reached, 502), (1.0 - 2**-53, 1)):
        draws.generator = SimpleNamespace(random=lambda size: np.full(size, number))  # noqa: B023
        assert draws.draw(probs).tolist() == [token]


def test_every_bit_of_a_seed_counts():
    probs = torch.full((8, 1000), 1e-3)
    for kind in (
        lambda draws: draws.draw(probs),
        lambda draws: draws.noise(list(range(8)), probs).argmax(dim=-1),
    ):
        first = kind(Draws(7))
        assert torch.equal(kind(Draws(7)), first)
        for other in (7 + 2**32, 7 + 2**40, 7 + 2**64):
            assert not torch.equal(kind(Draws(other)), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_warped_in_float32(dtype):
    """Probabilities and their sums in half precision would lose most of a nucleus."""
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    distribution = Distribution(0.7, 0.9)
    found = distribution(logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, distribution(logits.float()))
