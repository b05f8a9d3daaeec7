"""From logits to a token: temperature, top-k, top-p and every random choice.

Knows nothing about drafts or targets.
"""

from dataclasses import dataclass

import torch

FILL = 1e-300  # of a token that is drawn only where no other is left: far below any probability


def warp(logits, temperature, top_p=1.0, top_k=0):
    """Logits (..., V) -> probabilities (..., V) after temperature (> 0), top-k, then top-p.

    They are computed in float32 or better. Top-k keeps the ``top_k`` largest logits and all that
    equal the last of them; 0 keeps all. Top-p keeps the smallest set of most probable tokens whose
    part of what is left reaches ``top_p`` (Holtzman et al. 2020, section 3.1).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
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
        """Distributions (R, V) -> one token of each (R,), where the sums reach a random number.

        In float32 they would lose rare tokens. ``torch.multinomial`` draws V numbers for one token.
        """
        sums = probs.cumsum(dim=-1, dtype=torch.float64)  # (R, V)
        numbers = 1.0 - torch.empty_like(sums[:, :1]).uniform_(generator=self.generator)  # (0, 1]
        return torch.searchsorted(sums, numbers * sums[:, -1:])[:, 0]

    def candidates(self, probs, count, replacement):
        """Distributions (R, V) -> ``count`` tokens of each (R, count), in the order of the draws.

        If fewer than ``count`` tokens have a probability above 0, others fill the end.
        """
        tokens = self.draw(probs)[:, None]
        while tokens.shape[1] < count:
            rest = probs if replacement else (probs.double() + FILL).scatter(1, tokens, 0.0)
            tokens = torch.cat((tokens, self.draw(rest)[:, None]), dim=1)
        return tokens


@dataclass(frozen=True)
class Sampling:
    """How a generation draws tokens: temperature 0 is greedy; ``replacement`` is for siblings."""

    temperature: float
    top_p: float
    replacement: bool
    sampler: Sampler
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == self.top_p == 1.0 and not self.top_k

    def warp(self, logits):
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from."""
        return warp(logits, self.temperature, self.top_p, self.top_k)
