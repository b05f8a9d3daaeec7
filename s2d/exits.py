"""The exits of a sorted draft: each says what may come next, and how sure it is.

Knows nothing about the target. Two kinds: ``LayerExit`` runs layers of the draft, exit 0, the
``TableExit``, looks in a table. What both have: ``layer``, how many layers it needs; ``threshold``,
which its confidence must exceed; ``longest``, the positions it can work on; ``filled``, how many it
has seen; and three methods. A prediction has a ``confidence``, the largest probability of all;
``free``, whether it took no pass; ``winners`` and ``sample``, which give tokens.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from .cache import move_up
from .model import LlamaConfig
from .ngram import ORDER, NGrams, top
from .sampling import warp

WINDOW = 256  # how much context a catch-up runs at a time, so that masks stay small
# Of a table, whose probabilities are rough. Measured with SmolLM2 on 48 Spec-Bench prompts at T = 1
# and T = 0.7: these accept most, and are about right above 0.3 (below, they promise too much).
UNKNOWN = 3.0  # times its probability: what a token that the table lacks usually reaches in a race
DAMPED = 0.5  # the power of what a token reaches in a race that says how probable it is to win


@dataclass(frozen=True)
class DraftConfig(LlamaConfig):
    """What config.json says: a Llama, and how to draft with it, unless told otherwise."""

    exit_layers: tuple[int, ...] = ()  # the layers after which it may predict
    thresholds: tuple[float, ...] = ()  # one for each exit: the confidence that is enough there
    draft_length: int = 6  # of a chain
    draft_stop: float = 0.0  # a chain ends where its path is less probable than this
    draft_tree: tuple[int, int, int] = (10, 4, 60)  # top_k, depth, size


@dataclass
class Prediction:
    """What layers say about the token after each of R positions."""

    hidden: torch.Tensor  # (R, hidden), the exit's hidden states
    logits: torch.Tensor  # (R, V)
    probs: torch.Tensor  # (R, V), before temperature and top-p
    best: torch.Tensor  # (R,), the largest of them
    tokens: torch.Tensor  # (R,), theirs
    confidence: float

    free = False

    def winners(self, count, sampling, positions):
        """Tokens (R, count) at ``positions``, and how probable the target is to choose each.

        At T = 0 they are the likeliest; above, the first in the race that its choice has to win.
        """
        if sampling.greedy and count == 1:
            return self.tokens[:, None], self.best[:, None]
        if sampling.greedy:
            tokens = self.logits.topk(count).indices
            return tokens, self.probs.gather(1, tokens)
        q = self.q(sampling)
        race = sampling.sampler.race(q, positions)  # (R, V), q / e
        # The target's p is not q, so a small number e alone should not decide: the geometric mean
        # of q and q / e does. At T = 1 trees of the default shape then accept 8 % to 15 % more than
        # with the likeliest. The winner stays: where p is q, it is the target's.
        scores = (q * race).sqrt()
        winner = race.argmax(dim=-1, keepdim=True)  # (R, 1)
        tokens = scores.scatter(1, winner, torch.inf).topk(count).indices
        weights = scores.gather(1, tokens)
        return tokens, weights / weights.sum(dim=-1, keepdim=True)

    def sample(self, count, sampling):
        """Tokens (R, count) in the order of their draws, and the q (R, V) they were drawn from."""
        q = self.q(sampling)
        return sampling.sampler.candidates(q, count, sampling.replacement), q

    def q(self, sampling):
        return self.probs if sampling.plain else sampling.warp(self.logits)


class LayerExit:
    """The exit after ``layer`` layers of ``model``. Its segment: those from the exit ``below`` on.

    The segment has a KV cache of its own and, for the next exit, keeps what its layers gave.
    """

    def __init__(self, model, below, layer, threshold, capacity, last):
        self.model, self.below, self.layer, self.threshold = model, below, layer, threshold
        self.dtype, self.longest = model.dtype, model.config.max_position_embeddings
        self.head = getattr(model, "draft_head", None)  # extras/draft_head.py
        self.vocab_size = len(self.head.tokens) if self.head else model.config.vocab_size
        self.first = below.layer if below else 0
        self.cache = model.new_cache(capacity, self.first, layer)
        size = 1, capacity, model.config.hidden_size
        self.hidden = None if last else torch.zeros(size, device=model.device, dtype=model.dtype)

    @property
    def filled(self):
        return self.cache.length

    def rounds(self, shape, levels):
        """To grow a tree: how often to ask, about how many nodes at once. Here that is a pass."""
        return levels, shape.top_k

    def predict(self, tree):
        """A prediction for each node of the frontier of ``tree`` (proposal.py)."""
        hidden = self.catch_up(tree)[0, -len(tree.frontier) :]  # (R, hidden)
        logits = self.model.logits(hidden, self.head)
        if self.head:
            logits = self.head.over_all(logits, self.model.config.vocab_size)  # (R, V)
        # Before temperature and top-p: so thresholds mean the same at any temperature.
        probs = warp(logits, temperature=1.0)
        best, tokens = probs.max(dim=-1)  # (R,) each
        confidence = best.max().item()  # one node that is sure is enough for all
        if math.isnan(confidence):
            raise ValueError("the draft's logits are NaN: its weights are damaged, or overflow")
        return Prediction(hidden, logits, probs, best, tokens, confidence)

    def keep(self, n, slots):
        """Forget all behind n positions of context, but for ``slots`` counted from there."""
        held = [slot for slot in slots if n + slot < self.cache.length]
        self.cache.keep(n, held)
        if self.hidden is not None:
            move_up(self.hidden, n, held)

    def catch_up(self, tree):
        """Run the segment on what it has not seen up to ``tree.end``: (1, T, hidden), the last."""
        n, end = len(tree.context), tree.end
        while True:
            seen = self.cache.length
            # Usually one pass. If it lags behind by much context, that goes first, a window at a
            # time; but a prompt, which it sees first of all, is causal and goes through whole.
            upto = end if seen == 0 or n - seen <= WINDOW else seen + WINDOW
            if self.below:  # the exit below has seen them all, and kept what its layers gave
                hidden = self.below.hidden.narrow(1, seen, upto - seen)
            else:
                drafted = tree.slot_tokens()[max(0, seen - n) : max(0, upto - n)]
                new = drafted.new_tensor(tree.context[seen:upto])
                hidden = self.model.embed(torch.cat((new, drafted))[None])
            how = *tree.attention().span(n, seen, upto), self.cache  # positions, mask
            hidden = self.model.run_layers(hidden, self.first, self.layer, *how)
            if self.hidden is not None:
                self.hidden.narrow(1, seen, upto - seen).copy_(hidden)
            if upto == end:
                return hidden


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


def sorted_exits(layers, thresholds, model, table, capacity):
    """The exits of ``model`` after so many ``layers`` each; 0 is the ``table``."""
    exits, below = [], None
    for layer, threshold in zip(layers, thresholds):
        if layer > 0:
            below = LayerExit(model, below, layer, threshold, capacity, layer == layers[-1])
        exits.append(below if layer > 0 else table)
    return exits
