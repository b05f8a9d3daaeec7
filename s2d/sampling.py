"""From logits to tokens: temperature, top-k, top-p, and every random number.

By default draft and target share the noise of a position, so that one seed gives one text whatever
drafts. ``choose_children`` says which tokens a draft proposes.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NOISE_KEPT = 64  # positions whose noise is kept: draft and target ask for the same ones
FILL = 1e-300  # added to every probability, so that a token can be drawn where none is left


def warp(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Logits (..., V) -> probabilities (..., V) after temperature (> 0), top-k, then top-p.

    In float32 or better. Top-k keeps the ``top_k`` largest logits and all that equal the last of
    them; 0 keeps all. Top-p keeps the smallest set of most probable tokens whose probabilities,
    among what is left, sum to ``top_p`` or more (Holtzman et al. 2020, section 3.1).
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = torch.softmax(logits / temperature, dim=-1)
    if top_p < 1.0:
        sorted_probs, order = probs.sort(dim=-1, descending=True)
        mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
        kept = sorted_probs.masked_fill(mass_before >= top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, kept)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


class Sampling:
    """How tokens are drawn, and every random number of a generation, from one seed.

    ``options``: temperature (0 is greedy), top_p, top_k, seed and coupled: True where draft and
    target share the noise of each position, False for rejection sampling with one generator.
    """

    def __init__(self, options, target):
        self.options, self.vocab_size = options, target.config.vocab_size
        self.greedy, self.coupled = options.temperature == 0, options.coupled
        self.generator = torch.Generator(target.device).manual_seed(options.seed)
        self.device = target.device
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        self.noise_at = lru_cache(NOISE_KEPT)(self.draw_noise)

    def warp(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from."""
        return warp(logits, self.options.temperature, self.options.top_p, self.options.top_k)

    def noise(self, positions: list[int]) -> Tensor:
        """Exponential noise e (R, V), which depends on the seed and the position alone.

        The token with the largest p / e is a draw from p (as with Gumbel-max), and two
        distributions that meet the same noise often give the same token (Daliri et al. 2024, arXiv
        2408.07978).
        """
        return torch.stack([self.noise_at(position) for position in positions])

    def draw_noise(self, position):
        # On the CPU: the same on every device. SFC64 takes half as long as Philox.
        generator = np.random.Generator(np.random.SFC64([self.options.seed, position]))
        noise = torch.from_numpy(generator.standard_exponential(self.vocab_size))
        return noise.clamp_(min=1e-30).to(self.device, self.dtype)  # (V,), to divide by

    def choices(self, logits: Tensor, positions: list[int]) -> Tensor:
        """The tokens (R,) that the target takes at ``positions``, by its logits (R, V)."""
        if self.greedy:
            return logits.argmax(dim=-1)
        return (self.warp(logits) / self.noise(positions)).argmax(dim=-1)

    def accept(self, probabilities: Tensor) -> Tensor:
        """(N,) bool: True with these ``probabilities`` (N,), independently."""
        numbers = torch.empty_like(probabilities).uniform_(generator=self.generator)
        return numbers < probabilities

    def draw(self, probs: Tensor) -> Tensor:
        """Distributions (R, V) -> one token of each (R,), where the sums reach a random number.

        In float32 sums would lose rare tokens; ``torch.multinomial`` draws V numbers per token.
        """
        sums = probs.cumsum(dim=-1, dtype=torch.float64)  # (R, V)
        numbers = 1.0 - torch.empty_like(sums[:, :1]).uniform_(generator=self.generator)  # (0, 1]
        return torch.searchsorted(sums, numbers * sums[:, -1:])[:, 0]

    def candidates(self, probs: Tensor, count: int) -> Tensor:
        """Distributions (R, V) -> ``count`` tokens of each (R, count), drawn without replacement.

        In the order of their draws. If fewer have a probability above 0, others fill the end.
        """
        tokens = self.draw(probs)[:, None]
        while tokens.shape[1] < count:
            rest = (probs.double() + FILL).scatter(1, tokens, 0.0)
            tokens = torch.cat((tokens, self.draw(rest)[:, None]), dim=1)
        return tokens


class Prediction(NamedTuple):
    """What an exit of the draft says about the token after each of R nodes."""

    probs: Tensor  # (R, K) at temperature 1, without top-k and top-p
    confidence: float  # the largest of them
    ids: Tensor | None = None  # (K,): the tokens of the columns; None: the whole vocabulary
    hidden: Tensor | None = None  # (R, hidden) of the exit, if it has layers


def choose_children(prediction: Prediction, count: int, positions: list[int], sampling: Sampling):
    """``count`` different tokens to draft at each of R ``positions``.

    Greedy: the most probable. Coupled: those with the largest q / √e. The target takes the largest
    p / e, but q is only near p: measured, q / √e gets more tokens accepted than q or q / e.
    Otherwise: drawn from q. Returns tokens and ranks, (R, count) each, and the q (R, V) that they
    were drawn from, if they were. Ranks: probabilities, or (coupled) shares of the sum of scores.
    """
    probs, ids = prediction.probs, prediction.ids
    if sampling.greedy:
        chosen_probs, chosen = probs.topk(count)
        return chosen if ids is None else ids[chosen], chosen_probs, None
    known = probs.sum(dim=-1, keepdim=True)  # 1; of a table, which does not know all, less
    # Where it knows nothing, the uniform distribution: any children will do.
    q = sampling.warp(torch.where(known > 0, probs, 1.0).log())  # (R, K)
    if sampling.coupled:
        noise = sampling.noise(positions)  # (R, V)
        noise = noise if ids is None else noise[:, ids]
        scores = q * known / noise.sqrt()
        # Unknown tokens are part of the sum, without noise.
        total = scores.sum(dim=-1, keepdim=True) + (1.0 - known).clamp(min=0.0)
        chosen_probs, chosen = (scores / total).topk(count)
        return chosen if ids is None else ids[chosen], chosen_probs, None
    chosen = sampling.candidates(q, count)
    chosen_probs = q.gather(1, chosen)
    if ids is not None:
        q = q.new_zeros(len(q), sampling.vocab_size).index_copy(1, ids, q)
        chosen = ids[chosen]
    return chosen, chosen_probs, q
