"""Counted chances: what the target makes of tokens that the draft was so sure of. Knows nothing about time.

All is in plain lists: a step counts some ten things, too few for arrays to be faster.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

import torch

from ..sampling import warp

EDGES = (
    0.003,
    0.01,
    0.03,
    0.06,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    0.98,
    0.995,
)  # of probability bins
BINS = len(EDGES) + 1
CENTRES = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0))]
UNKNOWN = 0.6  # the chance of a place of which nothing is known yet: enough to try
MEMORY = (
    64.0  # places that what a bin has seen before counts for, at most; so newer ones count for more
)
PRIOR = 48.0  # as many of those that came with the draft


def bin_of(prob):
    return bisect_right(EDGES, prob)


@dataclass
class Visit:
    """What one exit said about the R places of a level.

    ``exit`` is its number, ``tokens`` (R,) what it found likeliest and ``bins`` (R,) those of their probabilities, lists;
    ``logits`` (R, K).
    """

    exit: int
    tokens: list
    bins: list
    logits: torch.Tensor


@dataclass
class Level:
    """One level of a draft, to be graded later: the R places it was predicted for, and what was said about them.

    ``visits``: one for each exit it went through. ``tokens`` and ``bins`` (R, C), lists: the candidates, likeliest first.
    ``drawn``: the token that was drawn instead, if one was, as its place in the logits, and ``drawn_bin`` the bin of its
    probability. ``taken``: the bins of those nodes that the next level goes on from.
    """

    visits: list
    tokens: list
    bins: list
    drawn: int | None = None
    drawn_bin: int = 0
    taken: list = field(default_factory=list)

    @property
    def exit(self):
        """The number of the exit that was used."""
        return self.visits[-1].exit


class Chances:
    """Chances of acceptance by bins of the draft's own probability: ``table`` (rows, BINS), and how much each ``weighs``.

    Each is the mean of grades, what the target made of such tokens, between 0 and 1. The rows of a kind begin at ``row[kind]``;
    i and j are numbers of exits:

        first i          the likeliest token, by its probability; "other" i: each further candidate, by its own
        drawn i          a token yet to be drawn, by the largest probability; "token" i: one that was drawn, by its own
        deeper i, j      what exit j's likeliest is worth where exit i is so sure of its own; "deeper_drawn" i, j
        next i           the place after an accepted token of this probability; "next_drawn" i
        root, after      in one bin: the first place of a step, and any that follows an accepted token; "root_drawn", "after_drawn"
    """

    def __init__(self, exits, prior=None):
        self.exits, self.memory = exits, MEMORY
        own, pairs = ("first", "other", "drawn", "token"), ("deeper", "deeper_drawn")
        sizes = {kind: exits for kind in own} | {kind: exits**2 for kind in pairs}
        sizes |= {
            kind + way: size
            for kind, size in (("next", exits), ("root", 1), ("after", 1))
            for way in ("", "_drawn")
        }
        self.row, self.table = {}, []
        for kind, size in sizes.items():
            self.row[kind] = len(self.table)
            at_first = (
                CENTRES if kind in own + pairs else [UNKNOWN] * BINS
            )  # a probability is taken at face value
            self.table += [list(at_first) for _ in range(size)]
        self.weighs = [[1.0] * BINS for _ in self.table]
        if prior is not None:
            weighs, self.table = prior[0], [list(row) for row in prior[1]]
            self.weighs = [[min(weight, PRIOR) for weight in row] for row in weighs]

    def chance(self, kind, index=0, bin=0):
        return self.table[self.row[kind] + index][bin]

    def count(self, kind, index, bin, grade):
        """Let one more grade count, which makes all before it count for less once they are many."""
        row = self.row[kind] + index
        weight = self.weighs[row][bin] = min(self.weighs[row][bin], self.memory) + 1.0
        self.table[row][bin] += (grade - self.table[row][bin]) / weight

    def count_greedy(self, levels, places, tokens):
        """Count a step at T = 0, where the target's token is known: a candidate is it, or is not.

        ``places``, pairs of a level's number and a row in it, are those that the target came to; ``tokens`` what it took there.
        """
        right = []
        for (number, row), token in zip(places, tokens):
            level = levels[number]
            right.append([float(visit.tokens[row] == token) for visit in level.visits])
            for bin, other in zip(level.bins[row][1:], level.tokens[row][1:]):
                self.count("other", level.exit, bin, float(other == token))
        self.count_places("", levels, places, right)

    def count_sampled(self, levels, places, p, sampling, vocabulary):
        """Count a step above T = 0, where the target's distributions ``p`` (P, V) at P places are known.

        Everything that could have been done there is graded by the chance it had: the likeliest token by p of it, one to be
        drawn by the sum of min(p, q), one that was by min(1, p / q) of it. The draft drafts tokens of ``vocabulary`` (K,).
        """
        visits = [
            (place, row, visit)
            for place, (number, row) in enumerate(places)
            for visit in levels[number].visits
        ]
        of = torch.tensor([place for place, *_ in visits], device=p.device)  # (M,)
        drafted = (p if vocabulary is None else p[:, vocabulary])[of]  # (M, K)
        q = warp(
            torch.stack([visit.logits[row] for _, row, visit in visits]),
            sampling.temperature,
            sampling.top_p,
        )  # (M, K)
        overlap = torch.minimum(drafted, q).sum(dim=-1).tolist()
        likeliest = p[
            of, torch.tensor([visit.tokens[row] for _, row, visit in visits], device=p.device)
        ].tolist()
        right, drawn = [[] for _ in places], [[] for _ in places]
        for (place, *_), first, shared in zip(visits, likeliest, overlap):
            right[place].append(first)
            drawn[place].append(shared)
        last = [
            number
            for number, (place, _, visit) in enumerate(visits)
            if visit is levels[places[place][0]].visits[-1]
        ]
        reached = [levels[number] for number, _ in places]
        if reached[0].drawn is not None:
            tokens = [0 if level.drawn is None else level.drawn for level in reached]
            taken = (drafted[last, tokens] / q[last, tokens]).clamp(max=1.0).tolist()
            for level, chance in zip(reached, taken):
                if level.drawn is not None:  # the last place may have been given up
                    self.count("token", level.exit, level.drawn_bin, chance)
        for place, (level, (_, row)) in enumerate(zip(reached, places)):
            if others := level.tokens[row][1:]:
                for bin, chance in zip(level.bins[row][1:], p[place, others].tolist()):
                    self.count("other", level.exit, bin, chance)
        self.count_places("", levels, places, right)
        self.count_places("_drawn", levels, places, drawn)

    def count_places(self, way, levels, places, right):
        """Count how ``right`` each place was at every exit it went through, and as a sequel of what came before it."""
        for place, ((number, row), grades) in enumerate(zip(places, right)):
            visits = levels[number].visits
            for i, (visit, grade) in enumerate(zip(visits, grades)):
                self.count("drawn" if way else "first", visit.exit, visit.bins[row], grade)
                for later, better in zip(visits[i + 1 :], grades[i + 1 :]):
                    self.count(
                        "deeper" + way,
                        visit.exit * self.exits + later.exit,
                        visit.bins[row],
                        better,
                    )
            if place:
                before = levels[number - 1]
                self.count("next" + way, before.exit, before.taken[row], grades[-1])
            self.count(("after" if place else "root") + way, 0, 0, grades[-1])
