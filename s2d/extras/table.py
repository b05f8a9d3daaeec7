"""Exit 0: no layers, but a table of what followed the last tokens before (ngram.py).

Knows nothing about the target. What an exit and a prediction have: exits.py.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from ..ngram import ORDER, NGrams, top

# Of a table, whose probabilities are rough. Measured with SmolLM2 on 48 Spec-Bench prompts at T = 1
# and T = 0.7: these accept most, and are about right above 0.3 (below, they promise too much).
UNKNOWN = 3.0  # times its probability: what a token that the table lacks usually reaches in a race
DAMPED = 0.5  # the power of what a token reaches in a race that says how probable it is to win


class TableExit:
    """The exit that looks in an NGrams: as a LayerExit, but no pass is made."""

    layer, longest = 0, math.inf

    def __init__(self, datastore, threshold, vocab_size, device, dtype):
        self.ngrams, self.threshold, self.filled = NGrams(datastore), threshold, 0
        self.vocab_size, self.device = vocab_size, device
        self.dtype = dtype if dtype == torch.float64 else torch.float32  # of q

    def rounds(self, shape, levels):
        """Its answers are cheap: a node at a time, until the best paths are known."""
        return shape.size, 1

    def predict(self, tree):
        self.ngrams.text.grow(tree.context[self.filled :])
        self.filled = len(tree.context)
        before = tree.context[-ORDER:]
        tails = ([*before, *path][-ORDER:] for path in tree.paths())
        return TablePrediction(self, [self.ngrams.distribution(tail) for tail in tails])

    def keep(self, n, slots):
        """The table has seen accepted tokens alone."""


@dataclass
class TablePrediction:
    """What exit 0 says about the token after each of R positions: as a Prediction.

    ``blends``: for each position, {token: probability} of the tokens that the table knows.
    """

    exit: TableExit
    blends: list[dict[int, float]]

    free = True

    @cached_property
    def confidence(self):
        return max(max(blend.values(), default=0.0) for blend in self.blends)

    def winners(self, count, sampling, positions):
        """As Prediction's. Where fewer are known, others fill the end, with probability 0."""
        pairs = []
        for blend, position in zip(self.blends, positions):
            row = blend if sampling.greedy else self.raced(blend, position, count, sampling)
            tokens = filled([token for token, _ in top(row, count)], count)
            pairs.append([(token, row.get(token, 0.0)) for token in tokens])
        pairs = torch.tensor(pairs, dtype=torch.float64, device=self.exit.device)  # (R, count, 2)
        return pairs[..., 0].long(), pairs[..., 1]

    def raced(self, blend, position, count, sampling):
        """{token: how probable it is to win the race}; all that is unknown takes part, as one."""
        numbers = sampling.sampler.numbers_at(position, self.exit.vocab_size)
        pairs = zip(blend.items(), numbers[list(blend)].tolist())
        # The likeliest of the unknown tokens may have half of what is left.
        rest, power = max(0.0, 1.0 - sum(blend.values())) / 2, 1 / sampling.temperature
        most = max(rest, *blend.values()) if blend else 1.0  # whose power is 1
        raced = {token: (q / most) ** power / e for (token, q), e in pairs}
        weights = {token: value**DAMPED for token, value in top(raced, count)}
        total = sum(weights.values()) + (2 * UNKNOWN * (rest / most) ** power) ** DAMPED
        return {token: weight / total for token, weight in weights.items()}

    def sample(self, count, sampling):
        """As Prediction's. Where nothing is known, q is uniform over the other rows' tokens."""
        known = filled(list(dict.fromkeys(chain.from_iterable(self.blends))), count)
        rows = [[blend.get(token, 0.0) for token in known] for blend in self.blends]
        like = dict(device=self.exit.device, dtype=self.exit.dtype)
        weights = torch.tensor(rows, **like)  # (R, K): all else has no probability
        weights[weights.sum(dim=-1) == 0] = 1.0
        small = sampling.warp(weights.log())
        chosen = sampling.sampler.candidates(small, count, sampling.replacement)
        known = torch.tensor(known, device=self.exit.device)
        q = torch.zeros(len(rows), self.exit.vocab_size, **like).index_copy(1, known, small)
        return known[chosen], q


def filled(tokens, count):
    """``tokens``, a list, and others behind them if they are fewer than ``count``."""
    others = [token for token in range(count) if token not in tokens]
    return tokens + others[: max(0, count - len(tokens))]
