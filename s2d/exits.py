"""The exits of a sorted draft: each says what may come next, and how sure it is.

Knows nothing about the target. Two kinds: ``LayerExit`` runs layers of the draft, exit 0 looks in a
table (extras/table.py). What both have: ``layer``, how many layers it needs; ``threshold``, which
its confidence must exceed; ``longest``, the positions it can work on; ``filled``, how many it has
seen; and three methods. A prediction has a ``confidence``, the largest probability of all;
``free``, whether it took no pass; ``winners`` and ``sample``, which give tokens.
"""

import math
from dataclasses import dataclass

import torch

from .cache import move_up
from .model import LlamaConfig
from .sampling import warp

WINDOW = 256  # how much context a catch-up runs at a time, so that masks stay small


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
        self.start = below.layer if below else 0
        self.cache = model.new_cache(capacity, self.start, layer)
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
            hidden = self.model.run_layers(hidden, self.start, self.layer, *how)
            if self.hidden is not None:
                self.hidden.narrow(1, seen, upto - seen).copy_(hidden)
            if upto == end:
                return hidden


def sorted_exits(layers, thresholds, model, table, capacity):
    """The exits of ``model`` after so many ``layers`` each; 0 is the ``table``."""
    exits, below = [], None
    for layer, threshold in zip(layers, thresholds):
        if layer > 0:
            below = LayerExit(model, below, layer, threshold, capacity, layer == layers[-1])
        exits.append(below if layer > 0 else table)
    return exits
