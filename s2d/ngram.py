"""Exit 0, a table of n-grams: which tokens followed the last few tokens where they stood before.

There are two tables: a ``Text`` grows with every accepted token, a datastore is fixed
(extras/datastore.py). For a suffix of the context, each gives the tokens that followed it and how
often. ``distribution`` blends these counts, from the longest suffix to the shortest. For a suffix
seen c times with u different followers, a table takes c / (c + doubt · u) of the probability that
is left (Witten-Bell smoothing; Chen & Goodman 1999): nearly all of it where one token followed
often, and no other. What is left at the end belongs to unknown tokens.
"""

import torch

from .sampling import Prediction

ORDER = 4  # tokens in the longest suffix
FOLLOWERS = 64  # different tokens that a table keeps for one suffix; this bounds the time


class Text:
    """The n-grams of the text itself; a suffix keeps the ``FOLLOWERS`` that came last."""

    doubts = 4.0, 2.0, 1.0, 0.7  # by the suffix's length: what follows a lone token says least

    def __init__(self):
        self.table = {}  # a suffix as a tuple -> {follower: count}, the latest follower last
        self.newest = ()

    def grow(self, tokens):
        """Append tokens to the text."""
        for token in tokens:
            for start in range(len(self.newest)):
                counts = self.table.setdefault(self.newest[start:], {})
                counts[token] = counts.pop(token, 0) + 1
                if len(counts) > FOLLOWERS:
                    del counts[next(iter(counts))]
            self.newest = (*self.newest, token)[-ORDER:]

    def followers(self, suffix):
        """The tokens that followed, and the count of each; neither where the suffix is new."""
        counts = self.table.get(tuple(suffix), {})
        return counts.keys(), counts.values()


def distribution(tables, context):
    """{token: probability} after ``context``; the sum is below 1, 0 where no suffix was seen.

    >>> text = Text()
    >>> text.grow([5, 6, 7, 5, 6, 7, 5, 6, 8])
    >>> {token: round(prob, 2) for token, prob in distribution([text], [5, 6]).items()}
    {7: 0.39, 8: 0.19}
    """
    left, blend = 1.0, {}
    for length in range(min(ORDER, len(context)), 0, -1):
        for table in tables:
            tokens, counts = table.followers(context[-length:])
            if not tokens:
                continue
            c, u = sum(counts), len(tokens)
            each = left / (c + table.doubts[length - 1] * u)
            for token, count in zip(tokens, counts):
                blend[token] = blend.get(token, 0.0) + each * count
            left -= each * c
    return blend


class TableExit:
    """Exit 0: what followed where the last tokens stood before, in this text and a datastore."""

    layer, max_positions = 0, float("inf")

    def __init__(self, datastore, threshold, device):
        self.text, self.threshold, self.device = Text(), threshold, device
        self.tables = [self.text] if datastore is None else [self.text, datastore]
        self.seen = 0  # tokens of the context that are in the table

    def predict(self, tree) -> Prediction:
        """As LayerExit's; a column for each token known after some node of the frontier."""
        self.text.grow(tree.context[self.seen :])
        self.seen = len(tree.context)
        before = tree.context[-ORDER:]
        rows = [distribution(self.tables, before + tree.path(node)) for node in tree.frontier]
        # A node may have more children than are known: with ids 0, 1, ... there are enough.
        others = dict.fromkeys(range(tree.shape.widths[tree.level]))
        ids = list(dict.fromkeys(token for row in rows for token in row) | others)
        probs = [[row.get(token, 0.0) for token in ids] for row in rows]
        return Prediction(
            torch.tensor(probs, dtype=torch.float64, device=self.device),  # (R, K)
            confidence=max(map(max, probs)),
            ids=torch.tensor(ids, device=self.device),  # (K,)
        )
