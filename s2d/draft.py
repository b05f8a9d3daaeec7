"""The sorted draft: several drafts in one, each token from the cheapest that is confident enough.

Knows nothing about the target. S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the
draft's layers fall into **segments**, each ending at an exit. A token that left at an early exit has
no keys and values in the deeper segments; when a later token needs those, the earlier ones must go
through first (catch-up). Here that takes no special case: every segment runs on all positions it has
not seen, context or tree, up to the newest, from the hidden states that the segment before it kept.
"""

from dataclasses import dataclass

import torch

from .cache import KVCache, move_up
from .proposal import TARGET, FixedTree, GrowingTree, Proposal, empty_proposal
from .sampling import warp
from .tree import KConfig, TreeAttention, ancestor_mask
from .verify import verify

WINDOW = 256  # how much context a catch-up runs at a time: a mask has no more rows than that


class NoDraft:
    """The smallest drafter: it proposes nothing, so the target decodes alone."""

    shape = KConfig(())
    exact = True

    def __init__(self, device):
        self.device = device

    def propose(self, context, budget, sampling):
        return empty_proposal(self.device)

    def verify(self, proposal, logits, sampling):
        return verify(proposal.tree, proposal.q, logits, sampling)

    def keep(self, n, proposal, verdict, logits):
        """There is nothing to roll back."""


@dataclass
class Segment:
    """Layers start..stop-1 with their KV cache, and the hidden states (1, slots, hidden) they gave.

    Nobody reads those of the last segment, so it keeps none.
    """

    start: int
    stop: int
    threshold: float
    cache: KVCache
    hidden: torch.Tensor | None


@dataclass
class Prediction:
    """What the draft says about the token after each of R positions, at one exit.

    ``hidden`` (R, hidden) are the exit's hidden states; ``logits`` and ``probs`` (R, K) are about
    the draft's vocabulary, ``probs`` before temperature and top-p. ``confidences``: the exits that
    were tried, each with its confidence, the largest probability of all; the last one was used.
    ``vocabulary`` (K,) are the tokens that the draft drafts, None for all ``vocab_size``.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    probs: torch.Tensor
    confidences: list[tuple[int, float]]
    vocabulary: torch.Tensor | None
    vocab_size: int

    def tokens(self, ids):
        """Ids in the draft's vocabulary -> tokens."""
        return ids if self.vocabulary is None else self.vocabulary[ids]

    def over_all_tokens(self, q):
        """Distributions (R, K) -> (R, V): probability 0 for what the draft never drafts."""
        if self.vocabulary is None:
            return q
        return q.new_zeros(len(q), self.vocab_size).index_copy(1, self.vocabulary, q)


class SortedDraft:
    """A draft model that continues contexts of at most ``capacity`` tokens by trees of one shape.

    ``exits`` are layer numbers, increasing, each with its threshold. Where even the last exit's
    confidence is below ``floor``, drafting ends. ``policy`` is a stopping policy, or None: asked
    after each level as ``policy(level, prediction, children, expanded)``, it says whether to end.
    """

    exact = True

    def __init__(self, model, exits, thresholds, shape, capacity, floor=0.0, policy=None):
        self.model, self.shape, self.floor, self.policy = model, shape, floor, policy
        slots = capacity + shape.max_slots
        like = dict(device=model.device, dtype=model.dtype)
        self.segments = []
        for start, stop, threshold in zip((0, *exits), exits, thresholds):
            cache = model.new_cache(slots, start, stop)
            last = stop == exits[-1]
            hidden = None if last else torch.zeros(1, slots, model.config.hidden_size, **like)
            self.segments.append(Segment(start, stop, threshold, cache, hidden))
        self.tokens = torch.zeros(1, slots, dtype=torch.long, device=model.device)
        self.known = 0  # how many tokens of the context are in ``tokens``
        self.attention = TreeAttention(WINDOW, shape.max_slots, model.device, model.dtype)
        if isinstance(shape, KConfig):
            self.parents = shape.parents().to(model.device)
            self.attention.set_tree(ancestor_mask(self.parents), shape.max_children == 1)

    def propose(self, context, budget, sampling) -> Proposal:
        """A Proposal behind ``context``, a list of tokens, if ``budget`` more may be emitted.

        One of these is the bonus token. ``sampling``: how tokens of a KConfig are drawn.
        """
        return self.grow(context, min(budget - 1, self.space(context)), sampling)

    def space(self, context):
        """How many levels the draft's own context size allows."""
        return self.model.config.max_position_embeddings - len(context) + 1

    def grow(self, context, max_levels, sampling, roots=None) -> Proposal:
        """As ``propose``, with at most ``max_levels`` levels.

        ``roots``: tokens (K,) and their log-probabilities (K,) that are to be the first level.
        """
        n = len(context)
        self.tokens[0, self.known : n] = torch.tensor(context[self.known :])
        self.known = n
        if isinstance(self.shape, KConfig):
            tree = FixedTree(self.shape, self.parents, sampling)
        else:
            tree = GrowingTree(self.shape, self.attention)
        exits, confidences = [], []
        stopped = "length" if max_levels >= self.shape.depth else "context"
        used, rows = 0, 1  # slots behind the context, and how many of the last to predict from
        for level in range(min(max_levels, self.shape.depth)):
            if level == 0 and roots is not None:
                prediction, exit_layer, children = None, TARGET, roots[0]
                expanded = tree.add_roots(*roots, self.model.config.vocab_size)
            else:
                prediction = self.predict(n, n + used, rows)
                confidences.append(prediction.confidences)
                exit_layer, confidence = prediction.confidences[-1]
                if exit_layer == self.segments[-1].stop and confidence < self.floor:
                    stopped = "confidence"
                    break
                children, expanded = tree.add_level(prediction)
            tokens = children.flatten()[expanded]
            rows = len(tokens)
            self.tokens[0, n + used : n + used + rows] = tokens
            used += rows
            exits.append(exit_layer)
            if self.policy and self.policy(level, prediction, children, expanded):
                stopped = "policy"
                break
        proposal = tree.proposal(exits)
        proposal.confidences, proposal.stopped = confidences, stopped
        proposal.filled = [segment.cache.length for segment in self.segments]
        return proposal

    def predict(self, n, end, count) -> Prediction:
        """A Prediction for each of the last ``count`` of ``end`` positions, n of which are context.

        The exit is the first whose confidence is above its threshold. Confidence is taken before
        temperature and top-p, so thresholds mean the same at any temperature; and it decides alone:
        no drawn token has a say in its own exit (verify.py's lemma).
        """
        confidences, below = [], None
        for segment in self.segments:
            hidden = self.catch_up(segment, below, n, end)[0, -count:]  # (R, hidden)
            logits = self.model.draft_logits(hidden)  # (R, K)
            probs = warp(logits, temperature=1.0)
            each = probs.amax(dim=-1).tolist()
            if any(confidence != confidence for confidence in each):
                raise ValueError("the draft's logits are NaN: its weights are damaged, or overflow")
            confidences.append((segment.stop, max(each)))
            if max(each) > segment.threshold:
                break
            below = segment
        model = self.model
        vocabulary, vocab_size = model.draft_vocabulary, model.config.vocab_size
        return Prediction(hidden, logits, probs, confidences, vocabulary, vocab_size)

    def catch_up(self, segment, below, n, end):
        """Run ``segment`` on all positions up to ``end`` that it has not seen.

        Their hidden states are in ``below``, the segment before, if there is one. Usually that is
        one pass. If the segment lags behind by more context than the mask's window, that goes first,
        a window at a time; but a prompt, which it sees first of all, is causal and goes through
        whole. Returns the last pass's hidden states (1, T, hidden).
        """
        while True:
            seen = segment.cache.length
            upto = end if seen == 0 or n - seen <= WINDOW else seen + WINDOW
            positions, mask = self.attention.span(n, seen, upto)
            if below:
                hidden = below.hidden[:, seen:upto]
            else:
                hidden = self.model.embed(self.tokens[:, seen:upto])
            cache = segment.cache
            hidden = self.model.run_layers(
                hidden, segment.start, segment.stop, positions, mask, cache
            )
            if segment.hidden is not None:  # the next segment reads them when it catches up
                segment.hidden[:, seen:upto] = hidden
            if upto == end:
                return hidden

    def verify(self, proposal, logits, sampling):
        return verify(proposal.tree, proposal.q, logits, sampling)

    def keep(self, n, proposal, verdict, logits):
        """Roll back to the n positions of context and the path that was accepted."""
        slots = proposal.slots[verdict.path].tolist()
        for segment in self.segments:
            held = [slot for slot in slots if n + slot < segment.cache.length]
            segment.cache.keep(n, held)
            if segment.hidden is not None:
                move_up(segment.hidden, n, held)
