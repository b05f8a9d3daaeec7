"""Models that are a table, for laws: small enough that every outcome can be taken."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..rules import Prediction
from ..tree import Tree
from .forks import Law, Outcome


class TableModel:
    """A made-up model with the call of a Hugging Face model. As a ``draft.Exit``, it drafts.

    The logits depend on the last three tokens and on the ``seed``. With a ``mixed_with`` model,
    they are half way between both: so a draft is like its target, and not the same.
    """

    device = torch.device("cpu")
    exit_layer = 1
    max_positions = math.inf

    def __init__(self, seed: int, vocab_size: int = 3, mixed_with: Any = None) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, max_position_embeddings=512)
        self.seed = seed
        self.mixed_with = mixed_with
        self.row = cache(self.make_row)

    def make_row(self, *last: int) -> Tensor:
        number = self.seed + sum((token + 1) * 0.1**place for place, token in enumerate(last))
        waves = torch.sin(number * torch.arange(100, 100 + self.config.vocab_size).double())
        row = 3 * (1e4 * waves).frac()  # as good as random, but nothing is drawn
        return row if self.mixed_with is None else (row + self.mixed_with.row(*last)) / 2

    def logits_after(self, *texts: Sequence[int]) -> Tensor:
        """Logits (R, V) for the token after the ids of each of R ``texts``."""
        return torch.stack([self.row(*text[-3:]) for text in texts])

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
        return Prediction(self.logits_after(*map(tree.path, nodes)), confidence=1.0)

    def __call__(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True, **others: Any
    ) -> SimpleNamespace:
        """Tokens (B, T) -> ``logits`` (B, T, V), and ``past_key_values``: a pair (keys, values).

        Both have the shape (B, 1, S, 1). They hold the S tokens so far, and may be cut.
        """
        tokens = input_ids
        if past_key_values is not None:
            tokens = torch.cat((past_key_values[0][0][:, 0, :, 0], tokens), dim=1)
        ends = range(tokens.shape[1] - input_ids.shape[1] + 1, tokens.shape[1] + 1)
        logits = [self.logits_after(*(text[:end] for end in ends)) for text in tokens.tolist()]
        keys = tokens[:, None, :, None]
        past = ((keys, keys),) if use_cache else None
        return SimpleNamespace(logits=torch.stack(logits), past_key_values=past)


TextDistribution = Callable[[Outcome], Tensor]  # a text -> probabilities (V,) of the next token


def text_law(distribution: TextDistribution, length: int, begun: Law | None = None) -> Law:
    """The law of texts of ``length`` tokens, each drawn from the distribution after the others.

    Texts that are ``begun`` are continued, and longer ones are cut.
    """
    waiting = {(): 1.0} if begun is None else dict(begun.probs)
    probs: dict[Outcome, float] = {}
    while waiting:
        text, prob = waiting.popitem()
        if len(text) >= length:
            probs[text[:length]] = probs.get(text[:length], 0.0) + prob
            continue
        for token, chance in enumerate(distribution(text).tolist()):
            if chance > 0:
                waiting[*text, token] = waiting.get((*text, token), 0.0) + prob * chance
    return Law(probs, begun is None or begun.enumerated)
