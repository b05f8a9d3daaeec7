"""From logits to a token: temperature, top-k, top-p and every random choice.

Knows nothing about drafts or targets.
"""

from dataclasses import dataclass

import numpy as np
import torch

KEPT = 32  # positions whose numbers are kept: more than a step looks ahead
FILL = 1e-300  # of a token that is drawn only where no other is left: far below any probability


def warp(logits, temperature, top_p=1.0, top_k=0):
    """Logits (..., V) -> probabilities (..., V) after temperature (> 0), top-k, then top-p.

    In float32 or better. Top-k keeps the ``top_k`` largest logits and all that equal the last of
    them; 0 keeps all. Top-p keeps the smallest set of most probable tokens whose part of what is
    left reaches ``top_p`` (Holtzman et al. 2020, section 3.1).
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
    """The only source of chance of a generation, handed to whoever needs a random choice.

    There are two kinds, from one seed: numbers that belong to positions (``race``), and a generator
    that goes on (all else). A test can hand in one that walks through every outcome instead.
    """

    def __init__(self, seed, device, dtype=torch.float64):
        self.seed, self.device, self.dtype = seed, device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)
        self.numbers = {}  # position -> (V,), of the last ones

    def numbers_at(self, position, vocab_size):
        """Exponential numbers (V,) that depend on the seed and on a position, on nothing else."""
        if position not in self.numbers:
            self.numbers = {n: kept for n, kept in self.numbers.items() if n > position - KEPT}
            # On the CPU, so that they are the same on every device.
            bits = np.random.SFC64([self.seed, position])  # half as long as Philox takes
            drawn = torch.from_numpy(np.random.Generator(bits).standard_exponential(vocab_size))
            drawn = drawn.clamp_(min=1e-30)  # to divide by
            self.numbers[position] = drawn.to(self.device, self.dtype)
        return self.numbers[position]

    def race(self, probs, positions):
        """p / e (R, V) of distributions (R, V) at ``positions``, R ints, e the numbers there.

        The largest is a draw from p, and the k largest are k draws without replacement (the same as
        Gumbel-max and Gumbel-top-k). Two distributions at one position meet the same numbers, so
        they are often won by the same token (Daliri et al. 2024, arXiv 2408.07978).
        """
        numbers = [self.numbers_at(position, probs.shape[-1]) for position in positions]
        return probs / torch.stack(numbers)

    def flip(self, probabilities):
        """Toss coins: whether numbers from [0, 1) are below ``probabilities`` (N,); and these."""
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
    """How a generation draws tokens."""

    temperature: float  # 0 is greedy
    top_p: float
    replacement: bool  # of siblings
    sampler: Sampler
    top_k: int = 0
    coupled: bool = False  # draft and target run the same race, so that no token is tested

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
