"""The sorted draft: several drafts in one, each token from the shallowest that is sure enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3). The draft's layers fall into **segments**, each ending at an
exit. A token that left at an early exit has no keys and values in the deeper segments; when a later token needs those,
the earlier ones must go through first. Here that takes no special case: every segment simply runs on whatever positions
it has not seen, up to the newest, from the hidden states that the segment before it left in its store. Knows nothing
about the target.
"""

from dataclasses import dataclass

import torch

from .sampling import warp


@dataclass
class Segment:
    """Layers start..stop-1, their cache, and the hidden states (1, capacity, hidden) they have put out so far."""

    start: int
    stop: int
    threshold: float
    cache: object
    hidden: torch.Tensor


@dataclass
class Chain:
    """N drafted tokens (N,), the distributions they were drawn from (N, V) (None at T = 0), and their exit layers."""

    tokens: torch.Tensor
    probs: torch.Tensor | None
    exits: list[int]


class SortedDraft:
    """A draft model with its exits, able to continue a context of at most ``capacity`` tokens."""

    def __init__(self, model, exits, thresholds, capacity):
        self.model = model
        shape = (1, capacity, model.config.hidden_size)
        self.segments = [
            Segment(start, stop, threshold, model.new_cache(capacity, start, stop),
                    torch.zeros(shape, device=model.device, dtype=model.dtype))
            for start, stop, threshold in zip((0, *exits), exits, thresholds)
        ]  # fmt: skip

    def predict(self, tokens):
        """All tokens so far (1, n) -> (logits (V,), confidence, exit layer) for the token after them.

        Confidence is the largest probability at the exit, before temperature and top-p, so that thresholds mean the
        same at any temperature. It decides alone: the choice of exit never looks at a sampled token.
        """
        n = tokens.shape[1]
        for segment in self.segments:
            seen = segment.cache.length
            hidden = self.model.embed(tokens[:, seen:]) if segment.start == 0 else below.hidden[:, seen:n]
            hidden = self.model.run_layers(hidden, segment.start, segment.stop, cache=segment.cache)
            segment.hidden[:, seen:n] = hidden  # for the next segment, whenever it catches up
            logits = self.model.logits(hidden[0, -1])  # (V,)
            confidence = warp(logits, temperature=1.0).max().item()
            if confidence > segment.threshold:
                break
            below = segment
        return logits, confidence, segment.stop

    def grow_chain(self, context, n, length, temperature, top_p, sampler, stop=None):
        """Draft up to ``length`` tokens after the first n of ``context`` (1, capacity), writing them into it.

        The chain ends early where even the last exit's confidence is under ``stop``.
        """
        probs, exits = [], []
        for end in range(n, n + length):
            logits, confidence, exit_layer = self.predict(context[:, :end])
            if stop is not None and exit_layer == self.segments[-1].stop and confidence < stop:
                break
            if temperature > 0:
                probs.append(warp(logits, temperature, top_p))
                context[0, end] = sampler.draw(probs[-1])
            else:
                context[0, end] = logits.argmax()
            exits.append(exit_layer)
        return Chain(context[0, n : n + len(exits)], torch.stack(probs) if probs else None, exits)

    def truncate(self, length):
        """Roll back to the first ``length`` positions, in every segment that has gone further."""
        for segment in self.segments:
            segment.cache.truncate(length)
