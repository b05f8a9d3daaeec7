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
from .proposal import GrowingTree, StaticTree
from .sampling import warp
from .tree import KConfig, TreeAttention, ancestor_mask

WINDOW = 256  # how much context a segment catches up on in one pass: masks are as wide as the context, but no higher


@dataclass
class Segment:
    """Layers start..stop-1, their cache, and the hidden states (1, places, hidden) they have put out so far.

    After the last segment comes nothing that would read them, so it keeps none.
    """

    start: int
    stop: int
    threshold: float
    cache: object
    hidden: torch.Tensor | None


@dataclass
class Prediction:
    """What the draft says about the token after each of R places, at one exit.

    ``hidden`` (R, hidden) are the exit's hidden states, ``logits`` and ``probs`` (R, K) its distributions over the draft's
    vocabulary, ``probs`` before temperature and top-p, and ``likeliest`` (R,) the places of their largest. ``looks`` are the
    exit layers that were looked at, and how confident each was: its largest probability of all; the last one was used.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    probs: torch.Tensor
    likeliest: torch.Tensor
    looks: list[tuple[int, float]]

    @property
    def exit_layer(self):
        return self.looks[-1][0]

    @property
    def confidence(self):
        return self.looks[-1][1]


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
    """A draft model with its exits that continues contexts of at most ``capacity`` tokens by trees of one ``shape``.

    With a ``tuner`` (tune/), that decides where to exit, to stop and to go on, within the shape's limits.
    """

    def __init__(self, model, exits, thresholds, shape, capacity, tuner=None):
        self.model, self.shape, self.tuner = model, shape, tuner
        self.static = isinstance(shape, KConfig)
        children = max(shape.widths, default=1) if self.static else shape.top_k
        if (
            not tuner
            and model.draft_vocabulary is not None
            and children > len(model.draft_vocabulary)
        ):
            known = len(model.draft_vocabulary)
            raise ValueError(
                f"a node cannot have {children} different children: there are {known} tokens that the draft drafts"
            )
        places = capacity + (shape.size if self.static else shape.top_k * shape.depth)
        self.segments = [
            Segment(start, stop, threshold, model.new_cache(places, start, stop),
                    torch.zeros(1, places, model.config.hidden_size, device=model.device, dtype=model.dtype)
                    if stop != exits[-1] else None)
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
        waiting, looks = [end - segment.cache.length for segment in self.segments], []
        for number, (segment, below) in enumerate(zip(self.segments, (None, *self.segments))):
            hidden = self.catch_up(segment, below, n, end)[0, -count:]  # (R, hidden)
            if self.tuner and self.tuner.passes_by(number, count, waiting):
                continue
            logits = self.model.draft_logits(hidden)  # (R, K)
            probs = warp(logits, temperature=1.0)
            sure, likeliest = probs.max(dim=-1)  # (R,)
            sure = sure.tolist()
            looks.append((segment.stop, max(sure)))
            if any(each != each for each in sure):
                raise ValueError(
                    "the draft's logits are no numbers: its weights are damaged, or too large for their dtype"
                )
            if self.tuner:
                if self.tuner.enough(
                    number, sure, self.tokens_at(likeliest).tolist(), logits, waiting
                ):
                    break
            elif max(sure) > segment.threshold:
                break
        return Prediction(hidden, logits, probs, likeliest, looks)

    def tokens_at(self, places):
        """Places in the draft's vocabulary -> tokens."""
        return (
            places if self.model.draft_vocabulary is None else self.model.draft_vocabulary[places]
        )

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
            hidden = (
                below.hidden[:, seen:upto] if below else self.model.embed(self.tokens[:, seen:upto])
            )
            hidden = self.model.run_layers(
                hidden, segment.start, segment.stop, positions, mask, segment.cache
            )
            if segment.hidden is not None:  # for the next segment, whenever that catches up
                segment.hidden[:, seen:upto] = hidden
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
        stopped = "length" if levels >= self.shape.depth else "room"
        if self.tuner:
            tree = self.tuner.tree(self, sampling)
            if not self.tuner.start(n, sampling):
                levels, stopped = 0, "rate"
        else:
            tree = (StaticTree if self.static else GrowingTree)(self, sampling)
        unsure, decision = (0.0, stop) if callable(stop) else (stop or 0.0, None)
        chances = torch.ones(
            1, device=self.tokens.device
        )  # a decision model's: that the target comes to each node
        used, rows, exits, looks = (
            0,
            1,
            [],
            [],
        )  # places behind the context, and how many of the last to predict from
        for level in range(min(levels, self.shape.depth)):
            if level == 0 and roots is not None:
                children, log_probs = tree.roots(*roots)  # (1, K)
                exit_layer, chances = 0, chances.expand(children.shape[1])
            else:
                prediction = self.predict(n, n + used, rows)
                looks.append(prediction.looks)
                exit_layer = prediction.exit_layer
                if exit_layer == self.segments[-1].stop and prediction.confidence < unsure:
                    stopped = "confidence"
                    break
                children, log_probs = tree.children(
                    prediction
                )  # (R, K), by their places in the draft's vocabulary
                if children is None:
                    stopped = "rate"
                    break
                if decision:
                    chances = (
                        chances[:, None]
                        * child_chances(decision(prediction), prediction.probs, children)
                    ).flatten()
                children = self.tokens_at(children)
            expanded = tree.add(children, log_probs)  # of children.flatten()
            tokens = children.flatten()[expanded]
            rows = len(tokens)
            self.tokens[0, n + used : n + used + rows] = tokens
            used += rows
            exits.append(exit_layer)
            if rows == 0:
                stopped = "rate"
                break
            if decision:
                chances = chances[expanded]
                if chances.max().item() < decision.threshold:
                    stopped = "decision"
                    break
        draft = tree.draft(exits)
        draft.looks, draft.stopped, draft.seen = (
            looks,
            stopped,
            [segment.cache.length for segment in self.segments],
        )
        return draft

    def keep(self, n, slots):
        """After verification: n places of context stay, and behind them what the caches hold in ``slots``, a list."""
        for segment in self.segments:
            held = [slot for slot in slots if n + slot < segment.cache.length]
            segment.cache.keep(n, held)
            if segment.hidden is not None:
                move_up(segment.hidden, n, held)
