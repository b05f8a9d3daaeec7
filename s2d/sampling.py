"""From logits to tokens: distributions, the noise of each position, and random draws."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .devices import to_device


def warp(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Logits (..., V) -> probabilities (..., V) after temperature (> 0), top-k, then top-p.

    Computed in float32 or better. Top-k keeps the ``top_k`` largest logits and all that equal the
    last of them; 0 keeps all. Top-p keeps the smallest set of most probable tokens whose
    probabilities, among what top-k left, sum to ``top_p`` or more (Holtzman et al. 2020, arXiv
    1904.09751, section 3.1).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if temperature != 1.0:
        logits = logits / temperature
    probs = torch.softmax(logits, dim=-1)
    if top_p < 1.0:
        sorted_probs, order = probs.sort(dim=-1, descending=True)
        mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
        kept = sorted_probs.masked_fill(mass_before >= top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, kept)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


class Noise:
    """Exponential noise e (V,) for each position of a text, from the seed and the position alone.

    The token with the largest p / e is a draw from p: the Gumbel-max trick, since -log e has a
    Gumbel distribution. A draft that knows e often guesses which token that is (Daliri et al. 2024,
    arXiv 2408.07978).
    """

    def __init__(
        self, seed: int, vocab_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = device
        self.dtype = dtype
        self.row = lru_cache(maxsize=64)(self.make_row)  # draft and target ask for the same rows

    def at(self, positions: list[int]) -> Tensor:
        """The noise (R, V) of ``positions`` (R,)."""
        return torch.stack([self.row(position) for position in positions])

    def make_row(self, position: int) -> Tensor:
        # On the CPU, so that it is the same for every device. SFC64 takes half as long as Philox.
        generator = np.random.Generator(np.random.SFC64([self.seed, position]))
        row = torch.from_numpy(generator.standard_exponential(self.vocab_size))
        row = row.clamp_(min=1e-30).to(self.dtype)  # never 0, as it is divided by
        return to_device(row, self.device)


def draft_scores(q: Tensor, e: Tensor) -> Tensor:
    """q / √e: the draft proposes the tokens with the largest, for a target that takes p / e.

    q is only near p. More of these tokens are accepted than of those with the largest q or q / e.
    That was measured, and not derived (end of bench/README.md).
    """
    return q / e.sqrt()


class Draws:
    """The random numbers of rejection sampling, one after another from one seed.

    They are drawn on the CPU and in float64, so that they are the same for every device and dtype.
    PyTorch's own generator would use no more than 32 bits of the seed.
    """

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.SFC64(seed))

    def uniform(self, count: int) -> Tensor:
        """``count`` random numbers in [0, 1)."""
        return torch.from_numpy(self.generator.random(count))

    def flip(self, probability: float) -> bool:
        """True with this ``probability``; 1 or more is certain."""
        return self.uniform(1).item() < probability

    def draw(self, probs: Tensor) -> Tensor:
        """Distributions (R, V) -> a token drawn from each (R,); ValueError: a row has NaN.

        A token is the index at which the cumulative sums reach a random number. In float32 the
        sums would lose rare tokens; ``torch.multinomial`` would draw V numbers per token.
        """
        sums = probs.cumsum(dim=-1, dtype=torch.float64)  # (R, V)
        if sums[:, -1].isnan().any():
            raise ValueError("nothing can be drawn from logits that are not finite")
        numbers = 1.0 - self.uniform(len(probs))[:, None]  # (R, 1), and never 0
        return torch.searchsorted(sums, numbers * sums[:, -1:])[:, 0]

    def candidates(self, probs: Tensor, count: int) -> Tensor:
        """Distributions (R, V) -> ``count`` tokens of each (R, count), drawn without replacement.

        They are in the order of their draws. If fewer than ``count`` tokens of a distribution are
        possible, impossible ones fill the end.
        """
        tokens = self.draw(probs)[:, None]  # (R, 1)
        rest = probs
        while tokens.shape[1] < count:
            rest = rest.scatter(1, tokens[:, -1:], 0.0)
            nothing_left = rest.sum(dim=1, keepdim=True) == 0  # (R, 1)
            if nothing_left.any():
                others = torch.ones_like(rest).scatter(1, tokens, 0.0)
                rest = torch.where(nothing_left, others, rest)
            tokens = torch.cat((tokens, self.draw(rest)[:, None]), dim=1)
        return tokens
