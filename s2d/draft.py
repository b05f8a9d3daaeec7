"""The sorted draft: several drafts in one, each token from the cheapest that is confident enough.

Knows nothing about the target. S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the
draft's layers fall into **segments**, each ending at an exit. A token that left at an early exit
has no keys and values in the deeper segments; when a later token needs those, it must go through
them first (catch-up). That takes no special case: every segment runs on all positions it has not
seen, context or tree, from the hidden states that the segment before it kept. The nodes of a round
leave together, where the most confident one does. Exit 0, our addition, is optional and has no
layers: it is a table of what followed the last tokens before (ngram.py).
"""

from dataclasses import dataclass

import torch

from .cache import KVCache, move_up
from .ngram import ORDER, NGrams, top
from .proposal import TARGET, FixedTree, GrowingTree, Proposal, empty_proposal
from .sampling import warp
from .tree import KConfig, TreeAttention
from .verify import verify

WINDOW = 256  # how much context a catch-up runs at a time, so that masks stay small


class NoDraft:
    """The smallest drafter: it proposes nothing, so the target decodes alone."""

    shape, exact = KConfig(()), True

    def __init__(self, device):
        self.nothing = empty_proposal(device)

    def propose(self, context, budget, sampling):
        return self.nothing

    def verify(self, proposal, logits, sampling):
        return verify(proposal.tree, proposal.q, logits, sampling)

    def keep(self, n, proposal, verdict, logits):
        """There is nothing to roll back."""


@dataclass
class Segment:
    """Layers start..stop-1, the threshold of the exit behind them, and their KV cache."""

    start: int
    stop: int
    threshold: float
    cache: KVCache
    hidden: torch.Tensor | None  # (1, slots, hidden): what the layers gave; None for the last one


@dataclass
class Prediction:
    """What the draft says about the token after each of R positions, at one exit.

    ``hidden`` (R, hidden) are the exit's hidden states; ``probs`` (R, V) are the probabilities of
    ``logits`` (R, V) before temperature and top-p; ``best`` and ``first`` (R,) are the largest and
    where it is. ``confidences``: the exits that were tried, each with its confidence, the largest
    probability of all; the last one was used.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    probs: torch.Tensor
    best: torch.Tensor
    first: torch.Tensor
    confidences: list[tuple[int, float]]

    def likeliest(self, count):
        """The ``count`` likeliest tokens (R, count), and their probabilities (R, count)."""
        if count == 1:
            return self.first[:, None], self.best[:, None]
        tokens = self.logits.topk(count).indices
        return tokens, self.probs.gather(1, tokens)

    def sample(self, count, sampling):
        """Tokens (R, count) in the order of their draws, and the q (R, V) they were drawn from."""
        q = self.probs if sampling.plain else sampling.warp(self.logits)
        return sampling.sampler.candidates(q, count, sampling.replacement), q


class Table:
    """Exit 0: no layers; what followed the last tokens before, in this text and in a datastore."""

    def __init__(self, ngrams: NGrams, vocab_size, device, dtype):
        self.ngrams, self.vocab_size, self.device = ngrams, vocab_size, device
        self.dtype = dtype if dtype == torch.float64 else torch.float32  # of q

    def predict(self, tails):
        """A TablePrediction for the positions after each of ``tails``, lists of their last tokens.

        Its confidence is the largest probability that the table gives to one token.
        """
        blends = [self.ngrams.distribution(tail) for tail in tails]
        confidence = max(max(blend.values(), default=0.0) for blend in blends)
        return TablePrediction(self, blends, [(0, confidence)])


@dataclass
class TablePrediction:
    """What exit 0 says about the token after each of R positions: the questions of a Prediction.

    ``blends``: for each position, {token: probability} of the tokens that the table knows.
    """

    table: Table
    blends: list[dict[int, float]]
    confidences: list[tuple[int, float]]

    def likeliest(self, count):
        """As Prediction's. Where fewer are known, others fill the end, with probability 0."""
        rows = []
        for blend in self.blends:
            tokens = filled([token for token, _ in top(blend, count)], count)
            rows.append([(token, blend.get(token, 0.0)) for token in tokens])
        pairs = torch.tensor(rows, dtype=torch.float64, device=self.table.device)  # (R, count, 2)
        return pairs[..., 0].long(), pairs[..., 1]

    def sample(self, count, sampling):
        """As Prediction's. Where nothing is known, q is uniform over the other rows' tokens."""
        known = list(dict.fromkeys(token for blend in self.blends for token in blend))
        known = filled(known, count)
        rows = [[blend.get(token, 0.0) for token in known] for blend in self.blends]
        like = dict(device=self.table.device, dtype=self.table.dtype)
        weights = torch.tensor(rows, **like)  # (R, K): all else has no probability
        weights[weights.sum(dim=-1) == 0] = 1.0
        small = sampling.warp(weights.log())
        chosen = sampling.sampler.candidates(small, count, sampling.replacement)
        known = torch.tensor(known, device=self.table.device)
        q = torch.zeros(len(rows), self.table.vocab_size, **like).index_copy(1, known, small)
        return known[chosen], q


def filled(tokens, count):
    """``tokens``, a list, and others behind them if they are fewer than ``count``."""
    others = [token for token in range(count) if token not in tokens]
    return tokens + others[: max(0, count - len(tokens))]


class SortedDraft:
    """A draft that continues contexts of at most ``capacity`` tokens by trees of one shape.

    ``exits`` increase, each with its threshold: 0 asks the ``table``, the others are layer numbers
    of ``model``, which is None where there is only exit 0. Drafting ends where a path is less
    probable than ``least``. Of a KConfig that is the product of its levels' confidences, and the
    level that makes it so is still sent where its pass was paid for, that is by layers.
    ``policy`` is a stopping policy, or None: asked after each round as ``policy(expanded,
    prediction, children, frontier)``, with the numbers of the nodes that were expanded and of those
    that come next, it says whether to end.
    """

    exact = True

    def __init__(
        self,
        model,
        exits,
        thresholds,
        shape,
        capacity,
        least=0.0,
        policy=None,
        table=None,
        costs=None,
    ):
        self.model, self.table, self.shape, self.costs = model, table, shape, costs
        self.exits, self.thresholds, self.least, self.policy = exits, thresholds, least, policy
        owner = model or table
        self.device, self.dtype = owner.device, owner.dtype
        slots = capacity + (shape.max_slots if model else 0)
        self.segments = []
        layers = [exit_layer for exit_layer in exits if exit_layer > 0]
        for start, stop in zip((0, *layers), layers):
            cache, threshold = model.new_cache(slots, start, stop), thresholds[exits.index(stop)]
            size, last = (1, slots, model.config.hidden_size), stop == exits[-1]
            hidden = None if last else torch.zeros(size, device=self.device, dtype=self.dtype)
            self.segments.append(Segment(start, stop, threshold, cache, hidden))
        self.tokens = torch.zeros(1, slots, dtype=torch.long, device=self.device)
        self.known = 0  # how many tokens of the context were read
        self.parents = shape.parents().to(self.device)
        self.attention = TreeAttention(self.parents, self.dtype)  # of a growing tree: fill_slots

    def propose(self, context, budget, sampling) -> Proposal:
        """A Proposal behind ``context``, a list of tokens, if ``budget`` more may be emitted.

        One of these is the bonus token. ``sampling``: how tokens of a KConfig are drawn.
        """
        return self.grow(context, min(budget - 1, self.space(context)), sampling)

    def space(self, context):
        """How many levels the draft's own context size allows; a table has none."""
        if not self.model:
            return self.shape.depth
        return self.model.config.max_position_embeddings - len(context) + 1

    def read(self, context):
        """Take in what is new of ``context``, a list of tokens."""
        new = context[self.known :]
        self.tokens[0, self.known : len(context)] = torch.tensor(new)
        self.known = len(context)
        if self.table:
            self.table.ngrams.grow(new)

    def grow(self, context, max_levels, sampling, roots=None) -> Proposal:
        """As ``propose``, with at most ``max_levels`` levels.

        ``roots``: a prediction by the target itself, for the first level (extras/roots.py).
        """
        self.read(context)
        n, levels = len(context), min(max_levels, self.shape.depth)
        tree, used = self.new_tree(levels, sampling), 0  # slots behind the context
        confidences, stopped = [], ""
        path, least = 1.0, self.least if self.shape.fixed else 0.0  # a growing tree has its own
        while tree.frontier:
            expanded, prediction, origin = tree.frontier, roots, TARGET
            if prediction is None:
                tails = self.tails(context, tree) if self.table else ()
                prediction = self.predict(n, n + used, len(expanded), tails)
                origin = len(confidences)
                confidences.append(prediction.confidences)
                exit_layer, confidence = prediction.confidences[-1]
                path *= confidence
                if exit_layer == 0 and self.shape.fixed and (path < least or confidence == 0.0):
                    stopped = "confidence"
                    break
            children = tree.add_level(prediction, origin)  # (R, K)
            roots = None  # from the second level on the draft predicts
            ends = self.policy and self.policy(expanded, prediction, children, tree.frontier)
            if tree.frontier and (ends or path < least):
                stopped = "policy" if ends else "confidence"
                break
            if tree.frontier and self.segments:
                self.fill_slots(n + used, tree)
                used += len(tree.frontier)
        proposal = tree.proposal()
        reached = "length" if levels == self.shape.depth else "context"
        proposal.stopped = stopped or proposal.stopped or reached
        proposal.confidences = confidences
        proposal.filled = [segment.cache.length for segment in self.segments]
        return proposal

    def new_tree(self, levels, sampling):
        """The tree of this step, before it has grown its first of so many ``levels``."""
        if self.shape.fixed:
            return FixedTree(self.shape, self.parents, sampling, levels)
        # A round of layers is a pass, over as many nodes as there may be children. A table's
        # answers are cheap: one at a time, until the best paths are known.
        rounds, width = (levels, self.shape.top_k) if self.segments else (self.shape.size, 1)
        return GrowingTree(self.shape, levels, rounds, width, self.least, self.device, self.costs)

    def tails(self, context, tree):
        """The last tokens at each node of a tree's frontier, which exit 0 is asked about."""
        return [[*context[-ORDER:], *path][-ORDER:] for path in tree.paths()]

    def fill_slots(self, slot, tree):
        """Put the frontier of a tree into the slots from ``slot`` on, for the segments to run."""
        self.tokens.narrow(1, slot, len(tree.frontier)).copy_(tree.frontier_tokens())
        if not self.shape.fixed:
            self.attention = TreeAttention(tree.slot_parents(), self.dtype)

    def predict(self, n, end, count, tails=()):
        """A Prediction for each of the last ``count`` of ``end`` positions, n of which are context.

        The exit is the first whose confidence is above its threshold, or else the last. Confidence
        is taken before temperature and top-p, so thresholds mean the same at any temperature; and
        it decides alone: no drawn token has a say in its own exit (verify.py's lemma).
        """
        confidences, below = [], None
        if self.table:
            prediction = self.table.predict(tails)
            confidences = prediction.confidences
            if confidences[0][1] > self.thresholds[0] or not self.segments:
                return prediction
        for segment in self.segments:
            hidden = self.catch_up(segment, below, n, end)[0, -count:]  # (R, hidden)
            logits = self.over_all_tokens(self.model.draft_logits(hidden))  # (R, V)
            probs = warp(logits, temperature=1.0)
            best, first = probs.max(dim=-1)  # (R,) each
            confidence = best.max().item()  # one node that is sure is enough for all
            if confidence != confidence:
                raise ValueError("the draft's logits are NaN: its weights are damaged, or overflow")
            confidences.append((segment.stop, confidence))
            if confidence > segment.threshold:
                break
            below = segment
        return Prediction(hidden, logits, probs, best, first, confidences)

    def over_all_tokens(self, logits):
        """Logits (R, K) of the draft's vocabulary -> (R, V): what it never drafts has -inf."""
        tokens = self.model.draft_vocabulary
        if tokens is None:
            return logits
        everything = logits.new_full((len(logits), self.model.config.vocab_size), -torch.inf)
        return everything.index_copy_(1, tokens, logits)

    def catch_up(self, segment, below, n, end):
        """Run ``segment`` on all positions up to ``end`` that it has not seen.

        Their hidden states are in ``below``, the segment before, if there is one. Usually that is
        one pass. If the segment lags behind by more context than WINDOW, that goes first, a window
        at a time; but a prompt, which it sees first of all, is causal and goes through whole.
        Returns the last pass's hidden states (1, T, hidden).
        """
        while True:
            seen = segment.cache.length
            upto = end if seen == 0 or n - seen <= WINDOW else seen + WINDOW
            positions, mask = self.attention.span(n, seen, upto)
            if below:
                hidden = below.hidden.narrow(1, seen, upto - seen)
            else:
                hidden = self.model.embed(self.tokens.narrow(1, seen, upto - seen))
            where = segment.start, segment.stop, positions, mask
            hidden = self.model.run_layers(hidden, *where, segment.cache)
            if segment.hidden is not None:
                segment.hidden.narrow(1, seen, upto - seen).copy_(hidden)
            if upto == end:
                return hidden

    def verify(self, proposal, logits, sampling):
        return verify(proposal.tree, proposal.q, logits, sampling)

    def keep(self, n, proposal, verdict, logits):
        """Roll back to the n positions of context and the path that was accepted."""
        slots = [proposal.slots[node] for node in verdict.path]
        for segment in self.segments:
            held = [slot for slot in slots if n + slot < segment.cache.length]
            segment.cache.keep(n, held)
            if segment.hidden is not None:
                move_up(segment.hidden, n, held)
