"""What a step proposes, and how the draft's levels become a tree: of a fixed shape, or growing.

Knows nothing about layers, exits or the target: levels come as Predictions (see draft.py).
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from .tree import KConfig, TokenTree, ancestor_mask

TARGET = -1  # stands for an exit where the target itself gave the token
NO_SLOT = 2**31  # of a node that is in no KV cache of the draft


@dataclass
class Proposal:
    """The token tree of a step, and how it came about.

    ``q`` (R, V): row 0 is the distribution the context's children were drawn from, row i + 1 that
    of node i's; None where nothing was drawn. ``slots`` (N,): where each node is in the draft's KV
    caches, counted from the end of the context, if it got there.

    ``exits`` and ``level_sizes``: for each level, the exit that proposed it (TARGET where the
    target gave it) and its number of nodes. ``confidences``: for each time the draft ran, the
    exits it tried, each with its confidence; the last one was used. ``stopped``: why there are no
    more levels: "length" of the shape, end of the "context", low "confidence", or a "policy".
    ``filled``: how many positions each segment's KV cache then held.
    """

    tree: TokenTree
    q: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    exits: list[int] = field(default_factory=list)
    level_sizes: list[int] = field(default_factory=list)
    confidences: list[list[tuple[int, float]]] = field(default_factory=list)
    stopped: str = ""
    filled: list[int] = field(default_factory=list)


def empty_proposal(device) -> Proposal:
    """Nothing is drafted: the target decodes alone."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Proposal(TokenTree(none, none), slots=none)


class FixedTree:
    """A KConfig's tree in the making: the likeliest children at T = 0, sampled ones above.

    Every node is expanded, so the slot of each is its number.
    """

    def __init__(self, shape: KConfig, parents, sampling):
        self.shape, self.parents, self.sampling = shape, parents, sampling
        self.depth = 0
        self.tokens = [parents[:0]]  # level by level; an empty one first, as there may be no level
        self.q = []

    def add_roots(self, tokens, log_probs, vocab_size):
        """Take tokens (K,) that the target gives as the first level."""
        self.q.append(torch.zeros(1, vocab_size, device=tokens.device))  # nobody reads this row
        return self._add(tokens)

    def add_level(self, prediction):
        """Choose and take the children of the R nodes that a Prediction is about.

        Returns children (R, K), and which of the flattened ones are expanded: all.
        """
        width = self.shape.widths[self.depth]
        if self.sampling.greedy:
            children, _ = prediction.likeliest(width)
        else:
            children, q = prediction.sample(width, self.sampling)
            self.q.append(q)  # (R, V)
        return children, self._add(children.flatten())

    def _add(self, tokens):
        self.tokens.append(tokens)
        self.depth += 1
        return slice(None)

    def proposal(self, exits):
        """The Proposal of all levels."""
        tokens = torch.cat(self.tokens)
        slots = torch.arange(len(tokens), device=tokens.device)
        q = torch.cat(self.q) if self.q else None
        tree = TokenTree(tokens, self.parents[: len(tokens)])
        return Proposal(tree, q, slots, exits, self.shape.level_sizes[: len(exits)])


class GrowingTree:
    """A Dynamic's tree in the making: the likeliest candidates of a level are expanded.

    Candidates are numbered level by level and scored by cumulative log-probability; in the end the
    best of all are kept. Only those that are expanded have a slot. With top_k = 2, where 0, 1, 2
    and 4 are expanded:

        context ─┬─ 0 ─┬─ 2        number    0   1   2   3   4   5        slot      0   1   2   3
                 │     └─ 3        parent   -1  -1   0   0   1   1        parent's -1  -1   0   1
                 └─ 1 ─┬─ 4        slot      0   1   2   -   3   -
                       └─ 5
    """

    def __init__(self, shape, attention):
        self.shape, self.attention = shape, attention  # whose mask is about the expanded nodes
        device = attention.depths.device
        root = torch.tensor([-1], device=device)
        score = torch.zeros(1, device=device)
        # The frontier: numbers, slots and scores (F,) of what is expanded next, first the context.
        self.frontier = root, root, score
        self.slot_parents = root[:0]
        self.count = self.depth = 0
        # Tokens, parents, slots, scores and depths of the candidates, level by level; an empty
        # level first, as there may be none.
        self.levels = [(root[:0], root[:0], root[:0], score[:0], root[:0])]

    def add_roots(self, tokens, log_probs, vocab_size):
        """Take tokens (K,) that the target gives, and its ``log_probs`` (K,), as first level."""
        return self._add(tokens[None], log_probs[None])

    def add_level(self, prediction):
        """Choose and take the likeliest children of the F nodes that a Prediction is about.

        Returns children (F, K), and which of the flattened ones are expanded.
        """
        children, log_probs = prediction.likeliest(self.shape.top_k)  # (F, K) each
        return children, self._add(children, log_probs)

    def _add(self, children, log_probs):
        numbers, slots, scores = self.frontier  # (F,) each
        used, top_k = len(self.slot_parents), self.shape.top_k
        scores = (scores[:, None] + log_probs).flatten()  # (F * K,)
        best = scores.topk(min(top_k, len(scores))).indices
        new_slots = torch.arange(used, used + len(best), device=best.device)
        all_slots = torch.full_like(scores, NO_SLOT, dtype=torch.long)
        all_slots = all_slots.index_copy(0, best, new_slots)
        depths = torch.full_like(all_slots, self.depth)
        parents = numbers.repeat_interleave(top_k)
        self.levels.append((children.flatten(), parents, all_slots, scores, depths))
        self.slot_parents = torch.cat((self.slot_parents, slots[best // top_k]))
        self.attention.set_tree(ancestor_mask(self.slot_parents))
        self.frontier = self.count + best, new_slots, scores[best]
        self.count += len(scores)
        self.depth += 1
        return best

    def proposal(self, exits):
        """The Proposal of the best candidates, numbered anew."""
        columns = zip(*self.levels)
        tokens, parents, slots, scores, depths = (torch.cat(column) for column in columns)
        # A parent scores no less than its children and is before them: it is kept where they are.
        kept = scores.sort(descending=True, stable=True).indices[: self.shape.size].sort().values
        kept = kept[scores[kept] > -torch.inf]  # of what has no probability there is no node
        # Old number -> new one; the last entry, found by index -1, is the context's.
        number = torch.full((self.count + 1,), -1, device=kept.device)
        number[kept] = torch.arange(len(kept), device=kept.device)
        tree = TokenTree(tokens[kept], number[parents[kept]])
        level_sizes = depths[kept].bincount(minlength=len(exits)).tolist()
        return Proposal(tree, None, slots[kept], exits, level_sizes)


def best_first(likeliest, context, shape, max_levels, least, device, roots=None) -> Proposal:
    """A growing tree where another node costs nothing but its row in the target's pass (exit 0).

    The node with the best path probability comes next, and its followers join the candidates, until
    there are ``shape.size`` nodes or no path is as probable as ``least``. ``likeliest(tail, k)``
    gives at most k pairs (token, probability); ``roots`` are such pairs for the first level.
    """
    nodes, heap = [], []  # of each node: depth, number, parent, token, its probability
    tail, path, parent, depth = context, 1.0, -1, 0
    followers = likeliest(tail, shape.top_k if max_levels > 0 else 0) if roots is None else roots
    while len(nodes) < shape.size:
        for token, probability in followers:
            if path * probability >= least:
                candidate = token, probability, parent, depth, [*tail[1:], token]
                heappush(heap, (-path * probability, len(heap) + len(nodes), candidate))
        if not heap:
            break
        path, _, (token, probability, parent, depth, tail) = heappop(heap)
        nodes.append((depth, len(nodes), parent, token, probability))
        path, parent, depth = -path, len(nodes) - 1, depth + 1
        missing = min(shape.top_k, shape.size - len(nodes)) if depth < max_levels else 0
        followers = likeliest(tail, missing) if missing else ()
    return level_by_level(nodes, device)


def level_by_level(nodes, device) -> Proposal:
    """The Proposal of ``nodes`` (see ``best_first``), numbered by level."""
    ordered = sorted(nodes)
    number = {-1: -1} | {old: new for new, (_, old, *_) in enumerate(ordered)}
    tokens = torch.tensor([token for *_, token, _ in ordered], dtype=torch.long, device=device)
    parents = [number[parent] for _, _, parent, _, _ in ordered]
    parents = torch.tensor(parents, dtype=torch.long, device=device)
    depths = [depth for depth, *_ in ordered]
    sizes = [depths.count(depth) for depth in range(depths[-1] + 1 if depths else 0)]
    surest = [max(p for d, *_, p in ordered if d == depth) for depth in range(len(sizes))]
    proposal = Proposal(TokenTree(tokens, parents), slots=torch.zeros_like(tokens))
    proposal.exits, proposal.level_sizes = [0] * len(sizes), sizes
    proposal.confidences = [[(0, confidence)] for confidence in surest]
    return proposal
