"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position; its likeliest tokens, or
several that are drawn from it, become the roots, and the draft only extends them (Improved MCSD,
arXiv 2409.10644, "target initialized"). As published, every root counts as accepted and the longest
path below one wins. That is not lossless, unless there is one root.
"""

from typing import NamedTuple

import torch

from ..draft import SortedDraft
from ..sampling import warp
from ..tree import CONTEXT
from ..verify import verify, without


class TargetRoots:
    """A drafter around a SortedDraft. Its first step only finds roots and emits nothing.

    The verifier's bonus token waits: it is the first root of the next tree, and may yet lose. Where
    draft and target run the same race, a root that is not the target's choice is no part of a path.
    """

    def __init__(self, drafter: SortedDraft, coupled):
        self.drafter, self.shape = drafter, drafter.shape
        self.exact = coupled or drafter.shape.roots == 1
        self.roots = None  # a Roots, after the first pass

    def propose(self, context, budget, sampling):
        if self.roots is None:
            return self.drafter.nothing
        levels = max(1, min(budget, self.drafter.space(context)))
        return self.drafter.grow(context, levels, sampling, self.roots)

    def verify(self, n, proposal, logits, sampling):
        """One walk a root; the longest wins."""
        tree, roots = proposal.tree, (CONTEXT,)
        if len(tree) and not sampling.coupled:
            roots = (tree.parents == CONTEXT).nonzero().flatten().tolist()
        verdict = verify(n, tree, proposal.q, logits, sampling, roots)
        path, [*tokens, bonus] = verdict.path, verdict.tokens
        after_path = logits[path[-1] + 1 if path else 0]
        position = n + len(path)
        self.roots = next_roots(bonus, after_path, self.shape.roots, sampling, position)
        return verdict._replace(tokens=tokens)

    def keep(self, n, proposal, verdict, logits):
        self.drafter.keep(n, proposal, verdict, logits)


class Roots(NamedTuple):
    """The first level as a prediction: tokens (1, K) and the target's probs (1, K), q (1, V)."""

    tokens: torch.Tensor
    probs: torch.Tensor
    q: torch.Tensor  # nobody reads it: a root faces no test

    free, confidence = False, 1.0

    def winners(self, count, sampling, positions):
        return self.tokens, self.probs

    def sample(self, count, sampling):
        return self.tokens, self.q


def next_roots(first, logits, count, sampling, position):
    """Roots: the token ``first`` and ``count`` - 1 more, by the target's ``logits`` (V,)."""
    tokens = torch.tensor([first], device=logits.device)
    probs = warp(logits, 1.0) if sampling.greedy else sampling.warp(logits)
    if count > 1:
        rest = without(probs, tokens[0])
        if sampling.greedy:
            others = rest.topk(count - 1).indices
        elif sampling.coupled:
            others = sampling.sampler.race(rest[None], [position])[0].topk(count - 1).indices
        else:
            others = sampling.sampler.candidates(rest[None], count - 1, replacement=False)[0]
        # A token of probability 0 is no root: the first one takes its slot.
        tokens = torch.cat((tokens, others.where(rest[others] > 0, first)))
    taken = probs[tokens]
    if sampling.coupled:  # the target's choice is known: no other root will be taken
        taken = (torch.arange(count, device=logits.device) == 0).to(taken)
    return Roots(tokens[None], taken[None], torch.zeros_like(probs)[None])
