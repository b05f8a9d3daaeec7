"""From logits to a token: temperature, top-p and the random choices. Knows nothing about drafts or targets."""

from dataclasses import dataclass

import torch


def warp(logits, temperature, top_p=1.0):
    """Logits (..., V) -> probabilities (..., V) after temperature (> 0) and top-p, in float32 or better.

    Top-p keeps the smallest set of most probable tokens whose mass reaches ``top_p`` (Holtzman et al. 2020, section 3.1).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature < 1.0:
        logits = logits - logits.amax(
            dim=-1, keepdim=True
        )  # so that dividing makes none of them infinite
    probs = torch.softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
    if top_p < 1.0:
        sorted_probs, order = probs.sort(dim=-1, descending=True)
        mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
        top_p = max(
            top_p, torch.finfo(probs.dtype).tiny
        )  # what rounds to 0 would keep no token at all
        outside = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
        probs = probs.masked_fill(outside, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


class Sampler:
    """The only source of randomness of a generation: three kinds of choice, drawn from one seeded generator.

    Whoever needs chance is handed this object, so a test can hand in one that walks through every outcome instead.
    """

    def __init__(self, seed, device):
        self.generator = torch.Generator(device).manual_seed(seed)

    def flip(self, chance):
        """A coin: chance () of heads -> whether it is heads, and the number () drawn from [0, 1), which then lies below it."""
        number = torch.rand((), device=chance.device, dtype=chance.dtype, generator=self.generator)
        return bool(number < chance), number

    def draw(self, probs):
        """Distributions (R, V) -> one token of each (R,)."""
        return torch.multinomial(probs, 1, generator=self.generator)[:, 0]

    def candidates(self, probs, count, replacement):
        """Distributions (R, V) -> ``count`` tokens of each (R, count), in the order in which they are drawn.

        Without replacement the k smallest of V exponential clocks running at the rates ``probs`` are k draws in turn
        (Kool et al. 2019, arXiv 1903.06059, section 2.3, says it with Gumbel noise). Where fewer than ``count`` tokens
        have a chance at all, tokens without one fill the end.
        """
        if replacement:
            return torch.multinomial(probs, count, replacement=True, generator=self.generator)
        clocks = torch.empty_like(probs).exponential_(generator=self.generator)
        return (probs / clocks).topk(count, dim=-1).indices


@dataclass(frozen=True)
class Sampling:
    """How a generation draws its tokens: temperature 0 is greedy; ``replacement`` is about a node's children."""

    temperature: float
    top_p: float
    replacement: bool
    sampler: Sampler
