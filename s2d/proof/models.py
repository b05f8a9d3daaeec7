"""Models that are a table, for laws: small enough that every outcome can be taken."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..rules import Prediction
from ..tree import Node, Tree
from .forks import Law, Outcome


class TableModel:
    """A made-up model of few tokens, with the call of a Hugging Face model. It is also an exit.

    The logits are random numbers, and depend on the last three tokens. With a ``mixed_with`` model,
    they are half way between both: so a draft is like its target, and not the same.
    """

    exit_layer = 1
    max_positions = inf

    def __init__(
        self, seed: int, vocab_size: int = 3, mixed_with: "TableModel | None" = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = [vocab_size + 1] * 3 + [vocab_size]  # one more, as there may be fewer tokens before
        self.table = 3 * torch.rand(size, dtype=torch.float64, generator=generator)
        if mixed_with is not None:
            self.table = (self.table + mixed_with.table) / 2

    def logits_after(self, *texts: Sequence[int]) -> Tensor:
        """Logits (R, V) for the token after the ids of each of R ``texts``."""
        return torch.stack([self.table[tuple([-1, -1, -1, *text][-3:])] for text in texts])

    def predict(self, tree: Tree, nodes: Sequence[Node]) -> Prediction:
        drafted = [[each.token for each in node.path[1:]] for node in nodes]
        return Prediction(self.logits_after(*drafted), confidence=1.0)

    def __call__(
        self, input_ids: Tensor, past_key_values: Any = None, **others: Any
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
        return SimpleNamespace(logits=torch.stack(logits), past_key_values=((keys, keys),))


def text_law(
    distribution: Callable[[Outcome], Tensor], length: int, begun: Law | None = None
) -> Law:
    """The law of texts of ``length`` tokens. Texts that are ``begun`` are continued or cut.

    ``distribution(text)`` are the probabilities (V,) of the token after it.
    """
    begun = begun or Law({(): 1.0}, enumerated=True)
    probs = begun.probs
    for _ in range(length):
        longer: dict[Outcome, float] = defaultdict(float)
        for text, prob in probs.items():
            if len(text) >= length:
                longer[text[:length]] += prob
            else:
                for token, chance in enumerate(distribution(text).tolist()):
                    longer[*text, token] += prob * chance
        probs = longer
    return Law(probs, begun.enumerated)
