"""The sorted draft: several drafts in one, each token from the shallowest that is sure enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3). The draft's layers fall into **segments**, each ending at an
exit. A token that left at an early exit has no keys and values in the deeper segments; when a later token needs those,
the earlier ones must go through first. Here that takes no special case: every segment simply runs on whatever places
it has not seen, context or tree, up to the newest, from the hidden states that the segment before it left in its store.
Knows nothing about the target.
"""

from dataclasses import dataclass

import torch

from .sampling import warp
from .tree import KConfig, TokenTree, TreeAttention, ancestor_mask


@dataclass
class Segment:
    """Layers start..stop-1, their cache, and the hidden states (1, capacity, hidden) they have put out so far."""

    start: int
    stop: int
    threshold: float
    cache: object
    hidden: torch.Tensor


@dataclass
class Draft:
    """What one step proposes.

    ``probs`` (R, V): row 0 is the distribution the context's children were drawn from, row i + 1 that of node i's; None
    where nothing was drawn. ``slots`` (N,): behind the context, the place of each node in the draft's caches, if it got
    there. ``exits`` and ``level_sizes``: for each level, the exit layer that proposed it and its number of nodes.
    """

    tree: TokenTree
    probs: torch.Tensor | None
    slots: torch.Tensor
    exits: list[int]
    level_sizes: list[int]


def no_draft(device):
    """Nothing proposed: the target decodes on its own."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Draft(TokenTree(none, none), None, none, [], [])


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
        self.attention = TreeAttention(capacity, places - capacity, model.device, model.dtype)
        if self.static:
            self.parents = shape.parents().to(model.device)
            self.attention.set_tree(ancestor_mask(self.parents))

    def predict(self, n, end, rows):
        """Logits (rows, V) after each of the last ``rows`` of ``end`` places, n of which are context; confidence; exit.

        Confidence is the largest probability at the exit, of any of these rows, before temperature and top-p, so that
        thresholds mean the same at any temperature. It decides alone: no sampled token ever has a say in its own exit.
        """
        for segment in self.segments:
            seen = segment.cache.length
            positions, mask = self.attention.rows(n, seen, end)
            hidden = self.model.embed(self.tokens[:, seen:end]) if segment.start == 0 else below.hidden[:, seen:end]
            hidden = self.model.run_layers(hidden, segment.start, segment.stop, positions, mask, segment.cache)
            segment.hidden[:, seen:end] = hidden  # for the next segment, whenever it catches up
            logits = self.model.logits(hidden[0, -rows:])  # (rows, V)
            confidence = warp(logits, temperature=1.0).max().item()
            if confidence > segment.threshold:
                break
            below = segment
        return logits, confidence, segment.stop

    def grow(self, context, n, levels, temperature, top_p, replacement, stop, sampler):
        """A Draft of at most ``levels`` levels after the first n tokens of ``context`` (1, n or more).

        Growing ends early after a level whose confidence at the last exit was under ``stop``.
        """
        self.tokens[:, :n] = context[:, :n]
        if self.static:
            return self._grow_static(n, levels, temperature, top_p, replacement, stop, sampler)
        return self._grow_dynamic(n, min(levels, self.shape.depth), stop)

    def _gives_up(self, confidence, exit_layer, stop):
        return stop is not None and exit_layer == self.segments[-1].stop and confidence < stop

    def _grow_static(self, n, levels, temperature, top_p, replacement, stop, sampler):
        """A KConfig tree: the likeliest children at T = 0, sampled ones above."""
        count, rows, probs, exits = 0, 1, [], []
        for width in self.shape.widths[:levels]:
            logits, confidence, exit_layer = self.predict(n, n + count, rows)
            if self._gives_up(confidence, exit_layer, stop):
                break
            if temperature > 0:
                probs.append(warp(logits, temperature, top_p))
                children = sampler.candidates(probs[-1], width, replacement)  # (rows, width)
            else:
                children = logits.topk(width).indices  # (rows, width)
            rows = children.numel()
            self.tokens[0, n + count : n + count + rows] = children.flatten()
            count += rows
            exits.append(exit_layer)
        tree = TokenTree(self.tokens[0, n : n + count].clone(), self.parents[:count])
        slots = torch.arange(count, device=self.tokens.device)
        return Draft(tree, torch.cat(probs) if probs else None, slots, exits, self.shape.level_sizes[: len(exits)])

    def _grow_dynamic(self, n, levels, stop):
        """A Dynamic tree: candidates are numbered level by level; only those that are expanded get a slot."""
        top_k, places, device = self.shape.top_k, self.tokens.shape[1], self.tokens.device
        frontier = frontier_slots = torch.tensor([-1], device=device)  # what to expand: numbers, slots, and below:
        frontier_scores = torch.zeros(1, device=device)  # cumulative log-probabilities
        slot_parents, count, columns, exits = frontier[:0], 0, [], []
        for _ in range(levels):
            used = len(slot_parents)
            logits, confidence, exit_layer = self.predict(n, n + used, len(frontier))
            if self._gives_up(confidence, exit_layer, stop):
                break
            gains, children = warp(logits, temperature=1.0).log().topk(top_k)  # (F, K)
            scores = (frontier_scores[:, None] + gains).flatten()  # (F * K,)
            children, parents = children.flatten(), frontier.repeat_interleave(top_k)
            best = scores.topk(min(top_k, len(scores))).indices  # the next frontier
            slots = torch.full_like(parents, places)  # for all others a place that no cache has
            slots[best] = torch.arange(used, used + len(best), device=device)
            slot_parents = torch.cat((slot_parents, frontier_slots.repeat_interleave(top_k)[best]))
            self.attention.set_tree(ancestor_mask(slot_parents))
            self.tokens[0, n + used : n + len(slot_parents)] = children[best]
            columns.append((children, parents, slots, scores, torch.full_like(parents, len(exits))))
            exits.append(exit_layer)
            frontier, frontier_slots, frontier_scores = count + best, slots[best], scores[best]
            count += len(scores)
        if not columns:
            return no_draft(device)
        tokens, parents, slots, scores, depths = (torch.cat(column) for column in zip(*columns))
        # A parent scores no less than its children and comes before them, so it is kept where they are.
        kept = scores.sort(descending=True, stable=True).indices[: self.shape.size].sort().values
        number = torch.full((count + 1,), -1, device=device)  # old number -> new one; the last entry is the context's
        number[kept] = torch.arange(len(kept), device=device)
        tree = TokenTree(tokens[kept], number[parents[kept]])
        return Draft(tree, None, slots[kept], exits, depths[kept].bincount(minlength=len(exits)).tolist())

    def keep(self, n, slots):
        """After verification: n places of context stay, and behind them what the caches hold in ``slots``, a list."""
        for segment in self.segments:
            held = [slot for slot in slots if n + slot < segment.cache.length]
            segment.cache.keep(n, held)
            if held:
                segment.hidden[:, n : n + len(held)] = segment.hidden[:, [n + slot for slot in held]]
