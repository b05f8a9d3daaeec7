"""From logits to a token: temperature, top-p and every random choice.

Knows nothing about drafts or targets.
"""

from dataclasses import dataclass

import torch


def warp(logits, temperature, top_p=1.0):
    """Logits (..., V) -> probabilities (..., V) after temperature (> 0) and top-p.

    They are computed in float32 or better. Top-p keeps the smallest set of most probable tokens
    whose mass reaches ``top_p`` (Holtzman et al. 2020, section 3.1).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature < 1.0:  # subtract first, so that the division makes none of them infinite
        logits = logits - logits.amax(dim=-1, keepdim=True)
    probs = torch.softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
    if top_p < 1.0:
        sorted_probs, order = probs.sort(dim=-1, descending=True)
        mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
        top_p = max(top_p, torch.finfo(probs.dtype).tiny)  # 0 would keep no token at all
        outside = torch.zeros_like(probs, dtype=torch.bool)
        outside = outside.scatter(-1, order, mass_before >= top_p)
        probs = probs.masked_fill(outside, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


class Sampler:
    """The only source of randomness of a generation: three kinds of choice, one seeded generator.

    Whoever needs a random choice is handed this object. A test can hand in one that walks through
    every outcome instead.
    """

    def __init__(self, seed, device):
        self.generator = torch.Generator(device).manual_seed(seed)

    def flip(self, probabilities):
        """Toss coins: whether numbers drawn from [0, 1) are below ``probabilities`` (N,), and they.

        Returns (N,) bool and (N,).
        """
        numbers = torch.empty_like(probabilities).uniform_(generator=self.generator)
        return numbers < probabilities, numbers

    def draw(self, probs):
        """Distributions (R, V) -> one token of each (R,)."""
        return torch.multinomial(probs, 1, generator=self.generator)[:, 0]

    def candidates(self, probs, count, replacement):
        """Distributions (R, V) -> ``count`` tokens of each (R, count), in the order of the draws.

        Without replacement, the k smallest of V exponential clocks that run at the rates ``probs``
        are k draws in turn (Kool et al. 2019, arXiv 1903.06059, section 2.3, says it with Gumbel
        noise). If fewer than ``count`` tokens have a probability above 0, others fill the end.
        """
        if replacement:
            return torch.multinomial(probs, count, replacement=True, generator=self.generator)
        clocks = torch.empty_like(probs).exponential_(generator=self.generator)
        return (probs / clocks).topk(count, dim=-1).indices


@dataclass(frozen=True)
class Sampling:
    """How a generation draws tokens: temperature 0 is greedy; ``replacement`` is for siblings."""

    temperature: float
    top_p: float
    replacement: bool
    sampler: Sampler

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == self.top_p == 1.0

    def warp(self, logits):
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from."""
        return warp(logits, self.temperature, self.top_p)
