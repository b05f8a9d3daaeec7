"""What a step proposes, and the two ways it is put together: a tree whose shape is known, and one that grows.

Both take levels as the draft predicts them, and know nothing about its layers, its exits or the target.
"""

from dataclasses import dataclass, field

import torch

from .sampling import warp
from .tree import TokenTree, ancestor_mask

NO_SLOT = 2**31  # for what is in no cache


@dataclass
class Draft:
    """What one step proposes.

    ``q`` (R, V): row 0 is the distribution the context's children were drawn from, row i + 1 that of node i's; None
    where nothing was drawn. ``slots`` (N,): behind the context, the place of each node in the draft's caches, if it got
    there. ``exits`` and ``level_sizes``: for each level, the exit layer that proposed it (0 where the target gave it)
    and its number of nodes. ``plan``: what a Tuner expected of the step (tune/).

    For who wants to see how it came about: ``looks``, those of every Prediction, that after which it gave up included;
    ``stopped``, why there are no more levels ("length" of the shape, "room" in the context, "confidence", "decision" model, or
    the "rate" of a Tuner); and ``seen``, how many places each segment's cache then held.
    """

    tree: TokenTree
    q: torch.Tensor | None
    slots: torch.Tensor | None
    exits: list[int]
    level_sizes: list[int]
    plan: dict | None = None
    looks: list = field(default_factory=list)
    stopped: str = ""
    seen: list[int] = field(default_factory=list)

    @property
    def forwards(self):
        """How often the draft ran: once for a level, and once more where it then gave up."""
        return len(self.looks)


def no_draft(device):
    """Nothing proposed: the target decodes on its own."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Draft(TokenTree(none, none), None, none, [], [])


def over_all_tokens(q, model):
    """Distributions (R, K) over a draft's vocabulary -> (R, V): no chance for what it never drafts."""
    if model.draft_vocabulary is None:
        return q
    return q.new_zeros(len(q), model.config.vocab_size).index_copy(1, model.draft_vocabulary, q)


class StaticTree:
    """A KConfig's tree in the making: the likeliest children at T = 0, sampled ones above.

    Every node is expanded; so each has a slot, a place behind the context in the draft's mask and caches: its number.
    """

    def __init__(self, drafter, sampling):
        self.shape, self.parents, self.model = drafter.shape, drafter.parents, drafter.model
        self.sampling, self.depth, self.q = sampling, 0, []
        self.tokens = [self.parents[:0]]  # level by level; in front none, as there may be none

    def roots(self, tokens, log_probs):
        """Tokens (K,) that the target gives the first level -> (1, K), and nothing they could be ranked by."""
        self.q.append(
            torch.zeros(1, self.model.config.vocab_size, device=tokens.device)
        )  # none was drawn: it is not read
        return tokens[None], None

    def children(self, prediction):
        """Children (R, K) of the R nodes that a Prediction is about, and nothing they could be ranked by."""
        width = self.shape.widths[self.depth]
        if self.sampling.temperature == 0:
            return prediction.logits.topk(width).indices, None
        q = warp(prediction.logits, self.sampling.temperature, self.sampling.top_p)  # (R, K)
        self.q.append(over_all_tokens(q, self.model))
        return self.sampling.sampler.candidates(q, width, self.sampling.replacement), None

    def add(self, children, log_probs):
        """Take the next level (R, K). Returns which of them are expanded: all."""
        self.tokens.append(children.flatten())
        self.depth += 1
        return slice(None)

    def draft(self, exits):
        """The Draft, all of whose levels are there."""
        tokens, q = torch.cat(self.tokens), torch.cat(self.q) if self.q else None
        tree, slots = (
            TokenTree(tokens, self.parents[: len(tokens)]),
            torch.arange(len(tokens), device=tokens.device),
        )
        return Draft(tree, q, slots, exits, self.shape.level_sizes[: len(exits)])


class GrowingTree:
    """A Dynamic's tree in the making: of every level the likeliest candidates are expanded, of all the likeliest are kept.

    Candidates are numbered level by level and scored by cumulative log-probability. Only those that are expanded have a
    slot: their place behind the context, in the draft's mask and caches. With top_k = 2, where 0, 1, 2 and 4 are expanded:

        context ─┬─ 0 ─┬─ 2        number    0   1   2   3   4   5        slot                   0   1   2   3
                 │     └─ 3        parent   -1  -1   0   0   1   1        slot of its parent    -1  -1   0   1
                 └─ 1 ─┬─ 4        slot      0   1   2   -   3   -
                       └─ 5
    """

    def __init__(self, drafter, sampling):
        self.shape, self.attention = drafter.shape, drafter.attention
        root, score = (
            torch.tensor([-1], device=drafter.tokens.device),
            torch.zeros(1, device=drafter.tokens.device),
        )
        self.frontier = (
            root,
            root,
            score,
        )  # numbers, slots and scores (F,) of what is expanded next: first the context
        self.slot_parents, self.count, self.depth = root[:0], 0, 0
        # Tokens, parents, slots, scores and depths of the candidates, level by level; in front none, as there may be none.
        self.levels = [(root[:0], root[:0], root[:0], score[:0], root[:0])]

    def roots(self, tokens, log_probs):
        """Tokens (K,) that the target gives the first level -> (1, K), and their log-probabilities (1, K)."""
        return tokens[None], log_probs[None]

    def children(self, prediction):
        """The likeliest children (F, K) of the F nodes that a Prediction is about, and their log-probabilities (F, K)."""
        log_probs, children = prediction.probs.log().topk(self.shape.top_k)
        return children, log_probs

    def add(self, children, log_probs):
        """Take the next level (F, K). Returns which of them are expanded; the draft's mask is about these."""
        numbers, slots, scores = self.frontier  # (F,) each
        used, top_k = len(self.slot_parents), self.shape.top_k
        scores = (scores[:, None] + log_probs).flatten()  # (F * K,)
        best = scores.topk(min(top_k, len(scores))).indices
        new_slots = torch.arange(used, used + len(best), device=best.device)
        every_slot = torch.full_like(scores, NO_SLOT, dtype=torch.long).index_copy(
            0, best, new_slots
        )
        depths = torch.full_like(every_slot, self.depth)
        self.levels.append(
            (children.flatten(), numbers.repeat_interleave(top_k), every_slot, scores, depths)
        )
        self.slot_parents = torch.cat((self.slot_parents, slots[best // top_k]))
        self.attention.set_tree(ancestor_mask(self.slot_parents))
        self.frontier = self.count + best, new_slots, scores[best]
        self.count, self.depth = self.count + len(scores), self.depth + 1
        return best

    def draft(self, exits):
        """The Draft of the best candidates, numbered anew."""
        tokens, parents, slots, scores, depths = (torch.cat(column) for column in zip(*self.levels))
        # A parent scores no less than its children and comes before them, so it is kept where they are.
        kept = scores.sort(descending=True, stable=True).indices[: self.shape.size].sort().values
        number = torch.full(
            (self.count + 1,), -1, device=kept.device
        )  # old number -> new one; the last is the context's
        number[kept] = torch.arange(len(kept), device=kept.device)
        level_sizes = depths[kept].bincount(minlength=len(exits)).tolist()
        return Draft(
            TokenTree(tokens[kept], number[parents[kept]]), None, slots[kept], exits, level_sizes
        )
