"""From logits to tokens: distributions, the noise of each position, and random draws."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .devices import to_device

NO_TOKEN = -1  # where the logits allow none
MAX_ROWS = 64  # of noise that are kept
NOT_FINITE = "the logits are not finite: damaged weights, overflow, or a rule that allows nothing"


@dataclass(frozen=True)
class Distribution:
    """Logits (..., V) -> probabilities (..., V) after temperature, top-k, then top-p.

    At temperature 0 the first of the largest logits has all the probability. A row without a finite
    logit gets a NaN, at every temperature. Computed in float32 or better. Top-k keeps the
    ``top_k`` largest logits and all that equal the last of them; 0 keeps all. Top-p keeps the
    smallest set of most probable tokens whose probabilities, among what top-k left, sum to
    ``top_p`` or more (Holtzman et al. 2020, arXiv 1904.09751, section 3.1).
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __call__(self, logits: Tensor) -> Tensor:
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.temperature == 0:
            best, tokens = logits.max(dim=-1, keepdim=True)
            return torch.zeros_like(logits).scatter(-1, tokens, best - best + 1.0)  # 1, or NaN
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        probs = torch.softmax(logits, dim=-1)
        if self.top_p < 1.0:
            sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
            mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
            kept = sorted_probs.masked_fill(mass_before >= self.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter(-1, order, kept)
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return probs


class Draws:
    """The random numbers of an answer, all from one seed.

    They are drawn on the CPU and in float64, so that they are the same for every device and dtype.
    PyTorch's own generator would use no more than 32 bits of the seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = np.random.Generator(np.random.SFC64(seed))
        self.rows: dict[tuple[Any, ...], Tensor] = {}  # of noise: draft and target ask for the same

    def flip(self, probability: float) -> bool:
        """True with this ``probability``; 1 or more is certain."""
        return self.generator.random() < probability

    def draw(self, probs: Tensor) -> Tensor:
        """Distributions (R, V) -> a token drawn from each (R,), on the CPU; ValueError for a NaN.

        A token is the index at which the cumulative sums reach a random number. In float32 the
        sums would lose rare tokens.
        """
        sums = probs.cumsum(dim=-1, dtype=torch.float64)  # (R, V)
        numbers = 1.0 - self.generator.random((len(probs), 1))  # never 0
        found = torch.searchsorted(sums, to_device(numbers, probs.device) * sums[:, -1:])  # (R, 1)
        tokens = torch.where(sums[:, -1:].isfinite(), found, NO_TOKEN)[:, 0].cpu()
        if NO_TOKEN in tokens:
            raise ValueError(NOT_FINITE)
        return tokens

    def candidates(self, probs: Tensor, count: int) -> Tensor:
        """Distributions (R, V) -> ``count`` tokens of each (R, count), drawn without replacement.

        They are in the order of their draws: token i arrives after a time from an exponential
        distribution with the rate probs[i], and the first arrivals are taken. Tokens with
        probability 0 come last.
        """
        times = torch.from_numpy(self.generator.standard_exponential(probs.shape))
        times = to_device(times.clamp_(min=1e-300), probs.device)
        return (probs / times).topk(count).indices

    def noise(self, positions: list[int], like: Tensor) -> Tensor:
        """Gumbel noise g (R, V) for the ``positions`` (R,) of a text, for distributions ``like``.

        It depends on the seed and the position alone. The token with the largest log p + g is a
        draw from p: the Gumbel-max trick. A draft that knows g often guesses which token that is
        (Daliri et al. 2024, arXiv 2408.07978).
        """
        rows = []
        for position in positions:
            key = position, like.shape[-1], like.device, like.dtype
            if key not in self.rows:
                self.rows[key] = self.make_noise(*key)
            rows.append(self.rows[key])
        while len(self.rows) > MAX_ROWS:
            del self.rows[next(iter(self.rows))]  # the oldest one
        return torch.stack(rows)

    def make_noise(
        self, position: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        # SFC64 takes half as long as Philox.
        generator = np.random.Generator(np.random.SFC64([self.seed, position]))
        row = torch.from_numpy(generator.standard_exponential(size))
        return to_device(-row.clamp_(min=1e-30).log_().to(dtype), device)
