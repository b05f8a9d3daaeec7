"""The sorted draft: several drafts in one, each token from the cheapest that is confident enough.

Knows nothing about the target. S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the
draft's layers fall into **segments**, each ending at an exit. A token that left at an early exit
has no keys and values in the deeper segments; when a later token needs those, it must go through
them first (catch-up). That takes no special case: every segment runs on all positions it has not
seen, context or tree, from the hidden states that the segment before it kept. The nodes of a round
leave together, where the most confident one does. Exit 0, our addition, is optional and has no
layers: it is a table of what followed the last tokens before.
"""

import torch

from .exits import Asked
from .proposal import TARGET, FixedTree, GrowingTree, LeastProbable, Proposal, empty_proposal
from .tree import KConfig, TreeAttention
from .verify import verify


class NoDraft:
    """The smallest drafter: it proposes nothing, so the target decodes alone.

    What every drafter has: the ``shape`` of its largest tree; ``exact``, whether the output follows
    the target's distribution; and three methods, called in this order in each step of decode.py.
    """

    shape, exact = KConfig(()), True

    def __init__(self, device):
        self.nothing = empty_proposal(device)

    def propose(self, context, budget, sampling) -> Proposal:
        """A Proposal behind ``context``, a list of tokens, if ``budget`` more may be emitted.

        The last of these is the target's own. ``sampling``: how tokens are drawn.
        """
        return self.nothing

    def verify(self, n, proposal, logits, sampling):
        """The Verdict on a proposal behind n positions, by the target's ``logits`` (N+1, V)."""
        return verify(n, proposal.tree, proposal.q, logits, sampling)

    def keep(self, n, proposal, verdict, logits):
        """Roll back to the n positions of context and the path that was accepted."""


class SortedDraft(NoDraft):
    """A draft that continues contexts of at most ``capacity`` tokens by trees of one shape.

    ``exits``: see exits.py, the cheapest first. ``rule`` ends drafting (``LeastProbable``).
    ``worth_sending``: how many nodes of a growing tree are, see proposal.py.
    """

    def __init__(self, exits, shape, rule, capacity, device, dtype, worth_sending=None):
        self.exits, self.shape, self.rule = exits, shape, rule
        self.device, self.dtype, self.worth_sending = device, dtype, worth_sending
        self.slots = torch.zeros(1, capacity, dtype=torch.long, device=device)  # their tokens
        self.seen = 0  # how many tokens of the context were read
        self.fills_slots = any(each.reads_slots for each in exits)
        self.parents = shape.parents().to(device)
        self.attention = TreeAttention(self.parents, dtype) if shape.fixed else None

    def propose(self, context, budget, sampling):
        return self.grow(context, min(budget - 1, self.space(context)), sampling)

    def space(self, context):
        """How many levels the draft's own context size allows."""
        return min(each.longest for each in self.exits) - len(context) + 1

    def grow(self, context, max_levels, sampling, roots=None) -> Proposal:
        """As ``propose``, with at most ``max_levels`` levels.

        ``roots``: a prediction by the target itself, for the first level (extras/roots.py).
        """
        self.read(context)
        levels = min(max_levels, self.shape.depth)
        tree, end = self.new_tree(len(context), levels, sampling), len(context)
        confidences, stopped = [], ""
        while tree.frontier and not stopped:
            expanded = tree.frontier
            if roots:  # from the second level on the draft predicts
                prediction, number, roots = roots, TARGET, None
            else:
                asked = Asked(context, self.slots, tree, end, len(expanded), self.attention)
                prediction, tried = self.predict(asked)
                number = len(confidences)
                confidences.append(tried)
            if not tree.takes(prediction):
                stopped = LeastProbable.reason
                break
            children = tree.add_level(prediction, number)  # (R, K), the new frontier is among them
            if self.rule.ends(tree, expanded, prediction, children) and tree.frontier:
                stopped = self.rule.reason
            elif tree.frontier and self.fills_slots:
                start, end = end, end + len(tree.frontier)
                self.slots[0, start:end] = tree.frontier_tokens()
        proposal = tree.proposal(self.worth_sending)
        reached = "length" if levels == self.shape.depth else "context"
        proposal.stopped = stopped or proposal.stopped or reached
        proposal.confidences = confidences
        proposal.filled = [each.filled for each in self.exits]
        return proposal

    def read(self, context):
        """Take in what is new of ``context``, a list of tokens."""
        new = context[self.seen :]
        if self.fills_slots:
            self.slots[0, self.seen : len(context)] = torch.tensor(new)
        self.seen = len(context)
        for each in self.exits:
            each.read(new)

    def new_tree(self, n, levels, sampling):
        """The tree behind n positions, before it has grown its first of so many ``levels``."""
        how = self.shape, n, sampling, levels, self.rule.least
        if self.shape.fixed:
            return FixedTree(*how, self.parents)
        rounds, at_once = self.exits[-1].rounds(self.shape, levels)
        return GrowingTree(*how, rounds, at_once, self.device, self.dtype)

    def predict(self, asked):
        """The prediction of the first exit that is sure enough, or else of the last one.

        And the exits that were tried, each with its confidence. This alone decides: no drawn token
        has a say in its own exit (verify.py's lemma).
        """
        tried = []
        for each in self.exits:
            prediction = each.predict(asked)
            tried.append((each.layer, prediction.confidence))
            if prediction.confidence > each.threshold:
                break  # the layers behind it are not run
        return prediction, tried

    def keep(self, n, proposal, verdict, logits):
        slots = [proposal.slots[node] for node in verdict.path]
        for each in self.exits:
            each.keep(n, slots)
