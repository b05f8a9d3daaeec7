"""Exit 0, a table of n-grams: what followed earlier occurrences of the last few tokens.

That a text predicts itself is known as prompt lookup (Saxena 2023). A ``Text`` grows with the text,
without drafted tokens. A datastore is fixed (datastore.py). For a suffix of the context, each gives
the tokens that followed it and how often.

``distribution`` asks both about the longest suffix, then about shorter ones, and each answer takes
a part of the probability that is left (Witten-Bell smoothing; Chen & Goodman 1999). A suffix that
was seen c times with u different followers takes c / (c + doubt · u), so nearly all if one token
followed often and no other did. What is left at the end belongs to unknown tokens.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from ..devices import to_device
from ..rules import Prediction
from ..tree import Tree

ORDER = 4  # tokens in the longest suffix
FOLLOWERS = 64  # different tokens that a table keeps for one suffix; this bounds the time


class Table(Protocol):
    """``Text``, or a datastore."""

    doubts: tuple[float, ...]  # by the suffix's length, from 1 to ORDER

    def followers(self, suffix: Sequence[int]) -> tuple[Collection[int], Collection[int]]:
        """The tokens that followed, and the count of each; none if the suffix is new."""


class Text:
    """The n-grams of the text itself; a suffix keeps the ``FOLLOWERS`` that came last."""

    doubts = 4.0, 2.0, 1.0, 0.7  # what follows a lone token says least

    def __init__(self) -> None:
        # A suffix -> {follower: count}. Dictionaries keep the order of insertion: the follower that
        # was seen longest ago comes first.
        self.table: dict[tuple[int, ...], dict[int, int]] = {}
        self.newest: tuple[int, ...] = ()

    def grow(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for start in range(len(self.newest)):
                counts = self.table.setdefault(self.newest[start:], {})
                counts[token] = counts.pop(token, 0) + 1  # put at the end
                if len(counts) > FOLLOWERS:
                    oldest = next(iter(counts))
                    del counts[oldest]
            self.newest = (*self.newest, token)[-ORDER:]

    def followers(self, suffix: Sequence[int]) -> tuple[Collection[int], Collection[int]]:
        counts = self.table.get(tuple(suffix), {})
        return counts.keys(), counts.values()


def distribution(tables: list[Table], context: list[int]) -> dict[int, float]:
    """{token: probability} after ``context``; the sum is below 1, and 0 if no suffix was seen.

    >>> text = Text()
    >>> text.grow([5, 6, 7, 5, 6, 7, 5, 6, 8])
    >>> {token: round(prob, 2) for token, prob in distribution([text], [5, 6]).items()}
    {7: 0.39, 8: 0.19}
    """
    left = 1.0
    blend: dict[int, float] = {}
    for length in range(min(ORDER, len(context)), 0, -1):
        for table in tables:
            tokens, counts = table.followers(context[-length:])
            if not tokens:
                continue
            c = sum(counts)
            each = left / (c + table.doubts[length - 1] * len(tokens))
            for token, count in zip(tokens, counts):
                blend[token] = blend.get(token, 0.0) + each * count
            left -= each * c
    return blend


class TableExit:
    """Exit 0: what followed the last tokens before, in this text or in a ``datastore``.

    What a row leaves to unknown tokens is divided among all tokens alike, so that a row sums to 1.
    """

    exit_layer = 0
    max_positions = float("inf")

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype,
        datastore: Table | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.dtype = dtype
        self.text = Text()
        self.tables = [self.text] if datastore is None else [self.text, datastore]
        self.text_length = 0  # tokens of the context that ``text`` has

    def predict(self, tree: Tree) -> Prediction:
        self.text.grow(tree.context[self.text_length :])
        self.text_length = len(tree.context)
        before = tree.context[-ORDER:]
        probs = torch.empty(
            len(tree.frontier), self.vocab_size, dtype=self.dtype, device="cpu"
        )  # (R, V)
        confidence = 0.0
        for row, node in zip(probs, tree.frontier):
            known = distribution(self.tables, before + tree.path(node))
            row.fill_(max(1e-9, 1.0 - sum(known.values())) / self.vocab_size)
            if known:
                row[list(known)] += torch.tensor(
                    list(known.values()), dtype=self.dtype, device="cpu"
                )
                confidence = max(confidence, *known.values())
        return Prediction(to_device(probs, self.device), confidence)

    def keep(self, tree: Tree, accepted: list[int]) -> None:
        """Nothing to roll back: the table reads the text so far, never drafted tokens."""
