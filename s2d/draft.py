"""The sorted draft: several drafts in one, each token from the shallowest that is sure enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3). The draft's layers fall into **segments**, each ending at an
exit. A token that left at an early exit has no keys and values in the deeper segments; when a later token needs those,
the earlier ones must go through first. Here that takes no special case: every segment simply runs on whatever places
it has not seen, context or tree, up to the newest, from the hidden states that the segment before it left in its store.
Knows nothing about the target.
"""

from dataclasses import dataclass

import torch

from .cache import move_up
from .sampling import warp
from .tree import KConfig, TokenTree, TreeAttention, ancestor_mask

WINDOW = 256  # how much context a segment catches up on in one pass: masks are as wide as the context, but no higher


@dataclass
class Segment:
    """Layers start..stop-1, their cache, and the hidden states (1, capacity, hidden) they have put out so far."""

    start: int
    stop: int
    threshold: float
    cache: object
    hidden: torch.Tensor


@dataclass
class Prediction:
    """What the draft says about the token after each of R places, at one exit.

    ``hidden`` (R, hidden) are the exit's hidden states, ``logits`` and ``probs`` (R, V) its distributions, ``probs``
    before temperature and top-p. ``confidence`` is the largest of them, over all rows.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    probs: torch.Tensor
    confidence: float
    exit_layer: int


@dataclass
class Draft:
    """What one step proposes.

    ``probs`` (R, V): row 0 is the distribution the context's children were drawn from, row i + 1 that of node i's; None
    where nothing was drawn. ``slots`` (N,): behind the context, the place of each node in the draft's caches, if it got
    there. ``exits`` and ``level_sizes``: for each level, the exit layer that proposed it (0 where the target gave it)
    and its number of nodes. ``forwards``: how often the draft ran.
    """

    tree: TokenTree
    probs: torch.Tensor | None
    slots: torch.Tensor
    exits: list[int]
    level_sizes: list[int]
    forwards: int


def no_draft(device):
    """Nothing proposed: the target decodes on its own."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Draft(TokenTree(none, none), None, none, [], [], 0)


def child_chances(first, probs, children):
    """Chances (R, K) that the target takes each of K ``children`` (R, K), given those (R,) for the first of each row.

    What the first leaves is shared among the others in proportion to the draft's ``probs`` (R, V).
    """
    share = probs.gather(1, children).float()  # (R, K)
    share[:, 0] = 0.0
    chances = (1.0 - first)[:, None] * share / share.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    chances[:, 0] = first
    return chances


class SortedDraft:
    """A draft model with its exits that continues contexts of at most ``capacity`` tokens by trees of one ``shape``."""

    def __init__(self, model, exits, thresholds, shape, capacity):
        self.model, self.shape = model, shape
        self.static = isinstance(shape, KConfig)
        places = capacity + (shape.size if self.static else shape.top_k * shape.depth)
        self.segments = [
            Segment(start, stop, threshold, model.new_cache(places, start, stop),
                    torch.zeros(1, places, model.config.hidden_size, device=model.device, dtype=model.dtype))
            for start, stop, threshold in zip((0, *exits), exits, thresholds)
        ]  # fmt: skip
        self.tokens = torch.zeros(1, places, dtype=torch.long, device=model.device)
        self.attention = TreeAttention(WINDOW, places - capacity, model.device, model.dtype)
        if self.static:
            self.parents = shape.parents().to(model.device)
            self.attention.set_tree(ancestor_mask(self.parents), shape.chain)

    def predict(self, n, end, count):
        """A Prediction for each of the last ``count`` of ``end`` places, n of which are context.

        The exit is the first whose confidence is above its threshold. As confidence comes before temperature and top-p,
        thresholds mean the same at any temperature; and it decides alone: no token has a say in its own exit.
        """
        for segment, below in zip(self.segments, (None, *self.segments)):
            hidden = self.catch_up(segment, below, n, end)[0, -count:]  # (R, hidden)
            logits = self.model.logits(hidden)  # (R, V)
            probs = warp(logits, temperature=1.0)
            confidence = probs.max().item()
            if confidence != confidence:
                raise ValueError("the draft's logits are no numbers: its weights are damaged, or too large for their dtype")
            if confidence > segment.threshold:
                break
        return Prediction(hidden, logits, probs, confidence, segment.stop)

    def catch_up(self, segment, below, n, end):
        """Run ``segment`` on all places up to ``end`` that it has not seen, from what ``below`` left in its store.

        Usually that is one pass. Where it lags behind by more context than the mask's window, that goes first, a window at
        a time; but a prompt, which it sees first of all, is causal and goes through whole. Returns the last pass's
        hidden states (1, T, hidden).
        """
        while True:
            seen = segment.cache.length
            upto = end if seen == 0 or n - seen <= WINDOW else seen + WINDOW
            positions, mask = self.attention.span(n, seen, upto)
            hidden = below.hidden[:, seen:upto] if below else self.model.embed(self.tokens[:, seen:upto])
            hidden = self.model.run_layers(hidden, segment.start, segment.stop, positions, mask, segment.cache)
            segment.hidden[:, seen:upto] = hidden  # for the next segment, whenever that catches up
            if upto == end:
                return hidden

    def grow(self, context, n, levels, sampling, stop=None, roots=None):
        """A Draft of at most ``levels`` levels after the first n tokens of ``context`` (1, n or more).

        ``sampling`` is how tokens are drawn where the shape is a KConfig and the temperature is above 0. ``stop`` ends
        the draft early: a number, where the last exit's confidence is below it; a decision model (decision.py), after a
        level of which no node is likely enough to be accepted. ``roots``: tokens (K,) and their log-probabilities (K,)
        that are to be the first level.
        """
        self.tokens[:, :n] = context[:, :n]
        grow = self._grow_static if self.static else self._grow_dynamic
        return grow(n, min(levels, self.shape.depth), sampling, stop, roots)

    def _gives_up(self, prediction, stop):
        unsure = stop is not None and not callable(stop) and prediction.confidence < stop
        return unsure and prediction.exit_layer == self.segments[-1].stop

    def _grow_static(self, n, levels, sampling, stop, roots):
        """A KConfig tree: the likeliest children at T = 0, sampled ones above."""
        count, rows, forwards, probs, exits = 0, 1, 0, [], []
        chances = torch.ones(1, device=self.tokens.device)  # a decision model's: that the target comes to each node
        for level, width in enumerate(self.shape.widths[:levels]):
            if level == 0 and roots is not None:
                children, exit_layer = roots[0], 0
                probs.append(torch.zeros(1, self.model.config.vocab_size, device=children.device))  # of no use: none drawn
                chances = chances.expand(width)
            else:
                prediction = self.predict(n, n + count, rows)
                forwards += 1
                if self._gives_up(prediction, stop):
                    break
                exit_layer = prediction.exit_layer
                if sampling.temperature > 0:
                    probs.append(warp(prediction.logits, sampling.temperature, sampling.top_p))
                    children = sampling.sampler.candidates(probs[-1], width, sampling.replacement)  # (rows, width)
                else:
                    children = prediction.logits.topk(width).indices  # (rows, width)
                if callable(stop):
                    chances = (chances[:, None] * child_chances(stop(prediction), prediction.probs, children)).flatten()
            rows = children.numel()
            self.tokens[0, n + count : n + count + rows] = children.flatten()
            count += rows
            exits.append(exit_layer)
            if callable(stop) and chances.max().item() < stop.threshold:
                break
        tree = TokenTree(self.tokens[0, n : n + count].clone(), self.parents[:count])
        slots = torch.arange(count, device=self.tokens.device)
        probs = torch.cat(probs) if probs else None
        return Draft(tree, probs, slots, exits, self.shape.level_sizes[: len(exits)], forwards)

    def _grow_dynamic(self, n, levels, sampling, stop, roots):
        """A Dynamic tree: candidates are numbered level by level; only those that are expanded get a slot."""
        top_k, places, device = self.shape.top_k, self.tokens.shape[1], self.tokens.device
        frontier = frontier_slots = torch.tensor([-1], device=device)  # what to expand: numbers, slots, and below:
        frontier_scores = torch.zeros(1, device=device)  # cumulative log-probabilities
        frontier_chances = torch.ones(1, device=device)  # a decision model's: that the target comes to the node
        slot_parents, count, forwards, columns, exits = frontier[:0], 0, 0, [], []
        for level in range(levels):
            used = len(slot_parents)
            if level == 0 and roots is not None:
                (children, gains), exit_layer = roots, 0
                chances = frontier_chances.expand(top_k)
            else:
                prediction = self.predict(n, n + used, len(frontier))
                forwards += 1
                if self._gives_up(prediction, stop):
                    break
                exit_layer = prediction.exit_layer
                gains, children = prediction.probs.log().topk(top_k)  # (F, K)
                if callable(stop):
                    chances = child_chances(stop(prediction), prediction.probs, children)
                    chances = (frontier_chances[:, None] * chances).flatten()
            scores = (frontier_scores[:, None] + gains).flatten()  # (F * K,)
            children, parents = children.flatten(), frontier.repeat_interleave(top_k)
            best = scores.topk(min(top_k, len(scores))).indices  # the next frontier
            slots = torch.full_like(parents, places)  # for all others a place that no cache has
            slots[best] = torch.arange(used, used + len(best), device=device)
            slot_parents = torch.cat((slot_parents, frontier_slots.repeat_interleave(top_k)[best]))
            self.attention.set_tree(ancestor_mask(slot_parents))
            self.tokens[0, n + used : n + len(slot_parents)] = children[best]
            columns.append((children, parents, slots, scores, torch.full_like(parents, level)))
            exits.append(exit_layer)
            frontier, frontier_slots, frontier_scores = count + best, slots[best], scores[best]
            count += len(scores)
            if callable(stop):
                frontier_chances = chances[best]
                if frontier_chances.max().item() < stop.threshold:
                    break
        if not columns:
            return no_draft(device)
        tokens, parents, slots, scores, depths = (torch.cat(column) for column in zip(*columns))
        # A parent scores no less than its children and comes before them, so it is kept where they are.
        kept = scores.sort(descending=True, stable=True).indices[: self.shape.size].sort().values
        number = torch.full((count + 1,), -1, device=device)  # old number -> new one; the last entry is the context's
        number[kept] = torch.arange(len(kept), device=device)
        tree = TokenTree(tokens[kept], number[parents[kept]])
        level_sizes = depths[kept].bincount(minlength=len(exits)).tolist()
        return Draft(tree, None, slots[kept], exits, level_sizes, forwards)

    def keep(self, n, slots):
        """After verification: n places of context stay, and behind them what the caches hold in ``slots``, a list."""
        for segment in self.segments:
            held = [slot for slot in slots if n + slot < segment.cache.length]
            segment.cache.keep(n, held)
            move_up(segment.hidden, n, held)
