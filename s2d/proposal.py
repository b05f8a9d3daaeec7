"""What a step proposes, and how the draft's levels become a tree: of a fixed shape, or growing.

Knows nothing about models: levels come as predictions (see exits.py).
"""

from dataclasses import dataclass
from itertools import islice

import torch

from .tree import CONTEXT, KConfig, TokenTree, TreeAttention

TARGET = -1  # stands for an exit, or a round, where the target itself gave the token
NO_SLOT = 2**31  # of a node that is in no KV cache of the draft


@dataclass
class Proposal:
    """The token tree of a step, and how it came about, in rounds: runs of the draft."""

    tree: TokenTree
    # (R, V): row 0 is the distribution the context's children were drawn from, row i + 1 that of
    # node i's. None where nothing was drawn.
    q: torch.Tensor | None = None
    slots: list[int] = ()  # of each node in the draft's KV caches, from the context's end on
    rounds: list[int] = ()  # of each node, which one proposed it, or TARGET
    depth: int = 0  # the tree's number of levels
    # For each round the exits it tried, each with its confidence; the last one was used.
    confidences: list[list[tuple[int, float]]] = ()
    # Why it ends: "length" of the shape, "context" (no more may follow), "confidence", "policy".
    stopped: str = ""
    filled: list[int] = ()  # for each exit how many positions its segment had then seen

    @property
    def exits(self) -> list[int]:
        """For each node the exit that proposed it, TARGET where the target gave it."""
        used = [tried[-1][0] for tried in self.confidences]
        return [TARGET if number == TARGET else used[number] for number in self.rounds]


class LeastProbable:
    """A stopping rule: drafting ends where its path is less probable than ``least``.

    Every rule has ``least`` (a growing tree drops each path below it), a ``reason``, and answers
    whether to end after a round, in which ``expanded`` got ``children`` (R, K). Another one:
    extras/decision.py.
    """

    reason = "confidence"

    def __init__(self, least):
        self.least = least

    def ends(self, tree, expanded, prediction, children) -> bool:
        return tree.likelihood < self.least


class FixedTree:
    """A KConfig's tree in the making, behind a context, of at most so many ``levels``.

    ``frontier`` are the numbers of the nodes that are expanded next. What is expanded has a slot;
    ``end`` is the number of positions up to the last of these. Here every node has one, that of its
    number. ``likelihood`` is that of its path: the product of its levels' confidences.
    """

    def __init__(self, shape: KConfig, context, sampling, levels, least, whole):
        self.shape, self.sampling, self.levels, self.least = shape, sampling, levels, least
        self.context, self.end, self.likelihood = context, len(context), 1.0
        self.whole = whole  # the TreeAttention of the whole shape
        self.tokens = []  # level by level
        self.q = []
        self.rounds = []
        self.frontier = (CONTEXT,) if levels > 0 else ()

    def takes(self, prediction):
        """Whether to make a level of it, decided before a token is drawn."""
        likelihood = self.likelihood * prediction.confidence
        # What took a pass is sent.
        return not prediction.free or likelihood >= self.least and likelihood > 0.0

    def add_level(self, prediction, number):
        """Give the frontier children, (R, K), by the prediction of round ``number``, or TARGET."""
        count = self.shape.widths[len(self.tokens)]
        if self.sampling.greedy or self.sampling.coupled:
            positions = [len(self.context) + len(self.tokens)] * len(self.frontier)
            children, _ = prediction.winners(count, self.sampling, positions)
        else:
            children, q = prediction.sample(count, self.sampling)
            self.q.append(q)  # (R, V)
        first_child = len(self.rounds)
        self.tokens.append(children.flatten())
        self.rounds += [number] * children.numel()
        self.likelihood *= prediction.confidence
        last = len(self.tokens) == self.levels
        self.frontier = () if last else range(first_child, len(self.rounds))
        self.end += len(self.frontier)
        return children

    def slot_tokens(self):
        """The tokens of the nodes in slots, (slots,)."""
        none = self.whole.parents[:0]  # where there is no level
        return torch.cat([none, *self.tokens])

    def attention(self):
        """The TreeAttention of what is in slots, and maybe of more behind it."""
        return self.whole

    def paths(self):
        """For each node of the frontier, the tokens from the context's end down to it, a list."""
        tokens, parents = self.slot_tokens().tolist(), self.whole.parents.tolist()
        return [path_to(node, tokens, parents) for node in self.frontier]

    def proposal(self, worth_sending):
        """The Proposal of all levels."""
        tokens = self.slot_tokens()
        q = torch.cat(self.q) if self.q else None
        tree = TokenTree(tokens, self.whole.parents[: len(tokens)])
        return Proposal(tree, q, range(len(tokens)), self.rounds, len(self.tokens))


class GrowingTree:
    """A Dynamic's tree in the making: the most probable paths first.

    All children that were ever found are candidates, numbered as they come; a path's probability is
    the product of its tokens'. The tree is made of the ``size`` best candidates, none less probable
    than ``least``. So each round expands those of them that have no children yet, the best
    ``at_once``: nothing else can get into the tree. With at_once = 2, when the rounds have expanded
    the context, then 0 and 1, then 2 and 4, whose children are not shown:

        context ─┬─ 0 ─┬─ 2 ─ ...  number    0   1   2   3   4   5        slot      0   1   2   3
                 │     └─ 3        parent   -1  -1   0   0   1   1        parent's -1  -1   0   1
                 └─ 1 ─┬─ 4 ─ ...  slot      0   1   2   -   3   -
                       └─ 5
    """

    likelihood = 1.0  # it drops its unlikely paths one by one

    def __init__(self, shape, context, sampling, levels, least, rounds, at_once, device, dtype):
        self.shape, self.sampling, self.levels, self.least = shape, sampling, levels, least
        self.context, self.end = context, len(context)
        self.rounds_left, self.at_once = rounds, at_once
        self.device, self.dtype = device, dtype
        # Of each candidate:
        self.tokens, self.parents, self.depths, self.probs, self.rounds = [], [], [], [], []
        self.best = []  # the numbers of those that make the tree so far, the most probable first
        self.slots = {CONTEXT: CONTEXT}  # of those that are expanded
        self.latest = None  # the TreeAttention of these
        self.frontier = [CONTEXT] if levels > 0 else []

    def takes(self, prediction):
        return True

    def add_level(self, prediction, number):
        """As FixedTree's."""
        depths = [0 if node == CONTEXT else self.depths[node] + 1 for node in self.frontier]
        positions = [len(self.context) + depth for depth in depths]
        how = self.shape.top_k, self.sampling, positions
        children, probs = prediction.winners(*how)  # (R, K) each
        rows = children.tolist(), probs.tolist()
        for parent, depth, tokens, each in zip(self.frontier, depths, *rows):
            above = 1.0 if parent == CONTEXT else self.probs[parent]
            self.tokens += tokens
            self.parents += [parent] * len(tokens)
            self.depths += [depth] * len(tokens)
            self.probs += [above * prob for prob in each]
            self.rounds += [number] * len(tokens)
        # A parent is no less probable than its children, and was there before them.
        ordered = sorted(range(len(self.tokens)), key=self.probs.__getitem__, reverse=True)
        best = [i for i in ordered[: self.shape.size] if self.probs[i] > 0]
        # What the target gave is sent whatever it is.
        self.best = [i for i in best if self.probs[i] >= self.least or self.rounds[i] == TARGET]
        waiting = (i for i in self.best if i not in self.slots and self.depths[i] + 1 < self.levels)
        self.rounds_left -= 1
        self.frontier = list(islice(waiting, self.at_once)) if self.rounds_left else []
        for node in self.frontier:
            self.slots[node] = len(self.slots) - 1
        self.end += len(self.frontier)
        self.latest = None
        return children

    def slot_tokens(self):
        """As FixedTree's."""
        tokens = [self.tokens[node] for node in self.slots if node != CONTEXT]
        return torch.tensor(tokens, dtype=torch.long, device=self.device)

    def attention(self):
        """The TreeAttention of what is in slots: for each, its node's parent's slot."""
        if self.latest is None:  # once a round, for all exits
            parents = [self.slots[self.parents[node]] for node in self.slots if node != CONTEXT]
            parents = torch.tensor(parents, dtype=torch.long, device=self.device)
            self.latest = TreeAttention(parents, self.dtype)
        return self.latest

    def paths(self):
        """As FixedTree's."""
        return [path_to(node, self.tokens, self.parents) for node in self.frontier]

    def proposal(self, worth_sending):
        """The Proposal of the best candidates, numbered anew, level by level.

        ``worth_sending`` says how many, by the probabilities of the best ones; None: all.
        """
        best = self.best
        if worth_sending:
            best = best[: worth_sending([self.probs[i] for i in best])]
        kept = sorted(best, key=lambda i: (self.depths[i], i))
        number = {CONTEXT: CONTEXT} | {old: new for new, old in enumerate(kept)}
        columns = [self.tokens[i] for i in kept], [number[self.parents[i]] for i in kept]
        tree = TokenTree(*torch.tensor(columns, dtype=torch.long, device=self.device))
        slots = [self.slots.get(i, NO_SLOT) for i in kept]
        proposal = Proposal(tree, None, slots, [self.rounds[i] for i in kept])
        proposal.depth = self.depths[kept[-1]] + 1 if kept else 0
        if self.rounds_left and proposal.depth < self.levels and len(kept) < self.shape.size:
            proposal.stopped = "confidence"
        return proposal


def path_to(node, tokens, parents):
    """The tokens from the first node down to ``node``; all lists. None for CONTEXT."""
    path = []
    while node != CONTEXT:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
