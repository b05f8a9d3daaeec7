"""Models that are a table, for laws: small enough that every outcome can be taken."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from numpy.random import SeedSequence
from torch import Tensor

from ..rules import Prediction
from ..tree import Node, Tree
from .forks import Law, Outcome

NOTHING = Law({(): 1.0}, enumerated=True)


class TableModel:
    """A made-up model of few tokens, with the call of a Hugging Face model. It is also an exit.

    The logits are random numbers, and depend on the whole text before. With a ``mixed_with`` model,
    they are half way between both: so a draft is like its target, and not the same.
    """

    exit_layer = 1
    max_positions = inf

    def __init__(self, seed: int, vocab_size: int = 3, mixed_with: Self | None = None) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self.mixed_with = mixed_with

    def logits_after(self, *texts: Sequence[int]) -> Tensor:
        """Logits (R, V) for the token after the ids of each of R ``texts``."""
        seeds = [[len(text), self.seed, *map(int, text)] for text in texts]
        words = [SeedSequence(seed).generate_state(self.vocab_size, np.uint64) for seed in seeds]
        logits = torch.from_numpy(3 * (np.stack(words) / 2**64))
        if self.mixed_with is not None:
            logits = (logits + self.mixed_with.logits_after(*texts)) / 2
        return logits

    def predict(self, tree: Tree, nodes: Sequence[Node]) -> Prediction:
        drafted = [[each.token for each in node.path[1:]] for node in nodes]
        return Prediction(self.logits_after(*drafted), confidence=1.0)

    def __call__(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True, **others: Any
    ) -> SimpleNamespace:
        """Tokens (B, T) -> ``logits`` (B, T, V), and ``past_key_values``: a pair (keys, values).

        Both have the shape (B, 1, S, 1). They hold the S tokens so far, and may be cut. A token at
        a wrong place, by ``position_ids``, counts as another one.
        """
        read = input_ids[:, :0] if past_key_values is None else past_key_values[0][0][:, 0, :, 0]
        ends = range(read.shape[1] + 1, read.shape[1] + input_ids.shape[1] + 1)
        if others.get("position_ids") is not None:
            moved = (others["position_ids"] + 1 - torch.tensor(ends)).abs()
            input_ids = input_ids + self.vocab_size * moved
        tokens = torch.cat((read, input_ids), dim=1)
        logits = [self.logits_after(*(text[:end] for end in ends)) for text in tokens.tolist()]
        keys = tokens[:, None, :, None]
        past = ((keys, keys),) if use_cache else None
        return SimpleNamespace(logits=torch.stack(logits), past_key_values=past)


def text_law(distribution: Callable[[Outcome], Tensor], length: int, begun: Law = NOTHING) -> Law:
    """The law of texts of ``length`` tokens. Texts that are ``begun`` are continued or cut.

    ``distribution(text)`` are the probabilities (V,) of the token after it.
    """
    probs = begun.probs
    for _ in range(length):
        longer: dict[Outcome, float] = defaultdict(float)
        for text, prob in probs.items():
            if len(text) >= length:
                longer[text[:length]] += prob
            else:
                for token, chance in enumerate(distribution(text).tolist()):
                    if chance > 0.0:
                        longer[*text, token] += prob * chance
        probs = longer
    return Law(probs, begun.enumerated)
