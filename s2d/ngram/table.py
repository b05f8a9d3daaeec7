"""Exit 0, a table of n-grams: what followed earlier occurrences of the last few tokens.

A text predicts itself: that is known as prompt lookup (Saxena 2023). A ``Text`` counts what
followed each suffix of the text so far. A datastore (datastore.py) does so for a fixed text.

``distribution`` makes probabilities of both. It begins with the longest suffix of the context, and
goes on with shorter ones. Each suffix takes a part of the probability that is left (Witten-Bell
smoothing; Chen & Goodman 1999). A suffix that was seen c times, with u different followers, takes
c / (c + doubt · u): nearly all, if one token followed often and no other did.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..devices import to_device
from ..model import Llama
from ..rules import Prediction
from ..stats import Step
from ..tree import Node, Tree

ORDER = 4  # tokens in the longest suffix


class Text:
    """The n-grams of the text so far."""

    # By the suffix's length, from 1 to ORDER: what follows a lone token says least.
    doubts = (4.0, 2.0, 1.0, 0.7)

    def __init__(self) -> None:
        # suffix -> {follower: count}
        self.table: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self.newest: tuple[int, ...] = ()  # the last tokens of the text, up to ORDER

    def grow(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for start in range(len(self.newest)):
                self.table[self.newest[start:]][token] += 1
            self.newest = (*self.newest, token)[-ORDER:]

    def followers(self, suffix: tuple[int, ...]) -> Mapping[int, int]:
        """{token: how often it followed ``suffix``}. It is empty if the suffix is new."""
        return self.table.get(suffix, {})


def distribution(tables: list[Any], context: list[int]) -> dict[int, float]:
    """{token: probability} after ``context``; the sum is below 1, and 0 if no suffix was seen.

    In the example 5 6 was followed by 7 twice and by 8 once, so c is 3, u is 2, and 7 gets first
    2 / (3 + 2.0 · 2) = 0.29. The suffix 6 gives 7 and 8 parts of the 0.57 that are left.

    >>> text = Text()
    >>> text.grow([5, 6, 7, 5, 6, 7, 5, 6, 8])
    >>> {token: round(prob, 2) for token, prob in distribution([text], [5, 6]).items()}
    {7: 0.39, 8: 0.19}
    """
    left = 1.0
    probs: dict[int, float] = {}
    for length in range(min(ORDER, len(context)), 0, -1):
        suffix = tuple(context[-length:])
        for table in tables:
            counts = table.followers(suffix)
            if not counts:
                continue
            total = sum(counts.values())
            doubt = table.doubts[length - 1] * len(counts)
            share = left / (total + doubt)  # of one occurrence
            for token, count in counts.items():
                probs[token] = probs.get(token, 0.0) + share * count
            left -= share * total
    return probs


class TableExit:
    """Exit 0: what followed the last tokens before, in this text or in other ``tables``.

    What a row leaves to unknown tokens is divided among all tokens alike, so that it sums to 1.
    """

    exit_layer = 0
    max_positions = float("inf")
    # Before exits with layers, which know more: tuned on miniatures (end of bench/README.md).
    threshold = 0.9
    # Alone: tuned on SmolLM2-135M with its datastore (end of bench/README.md).
    drafting = dict(method="s2d-tree", draft_length=4, stop=0.03, tree_stop=0.03, growing=(3, 5, 5))

    def __init__(self, target: Llama, draft: Llama | None = None) -> None:
        self.vocab_size = target.config.vocab_size
        self.device = target.device
        self.dtype = torch.promote_types(target.dtype, torch.float32)
        self.text = Text()
        self.tables: list[Any] = [self.text]  # this one, and datastores
        self.text_length = 0  # tokens of the context that ``text`` has

    def predict(self, tree: Tree, nodes: Sequence[Node]) -> Prediction:
        """As ``Exit.predict``; if the table knows nothing of any node, the confidence is 0."""
        self.text.grow(tree.context[self.text_length :])
        self.text_length = len(tree.context)
        before = tree.context[-ORDER:]
        texts = [[*before, *(each.token for each in node.path[1:])] for node in nodes]
        known = [distribution(self.tables, text) for text in texts]
        # Of each row, the probability of an unknown token.
        floors = [max(1e-9, 1.0 - sum(each.values())) / self.vocab_size for each in known]
        rows = [row for row, each in enumerate(known) for _ in each]
        tokens = [token for each in known for token in each]
        probs = [floor + prob for floor, each in zip(floors, known) for prob in each.values()]
        unknown = to_device(np.log(floors), self.device, self.dtype)[:, None]  # (R, 1)
        logits = unknown.expand(-1, self.vocab_size).contiguous()  # (R, V)
        where = to_device(np.array([rows, tokens]), self.device, torch.long)  # (2, known)
        logits.index_put_((where[0], where[1]), to_device(np.log(probs), self.device, self.dtype))
        return Prediction(logits, confidence=max(probs, default=0.0))

    def keep(self, step: Step) -> None:
        """Nothing to roll back: the table reads the text so far, never drafted tokens."""
