"""The sorted draft: several drafts in one, each token from the cheapest that is confident enough.

Knows nothing about the target. S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the
draft's layers fall into **segments**, each ending at an exit. A token that left at an early exit
has no keys and values in the deeper segments; when a later token needs those, it must go through
them first (catch-up). That takes no special case: every segment runs on all positions it has not
seen, context or tree, from the hidden states that the segment before it kept. The nodes of a round
leave together, where the most confident one does. Exit 0, our addition, has no layers.
"""

import torch

from .proposal import TARGET, FixedTree, GrowingTree, LeastProbable, Proposal
from .tree import KConfig, TokenTree, TreeAttention
from .verify import verify


class NoDraft:
    """The smallest drafter: it proposes nothing, so the target decodes alone.

    What every drafter has: the ``shape`` of its largest tree; ``exact``, whether the output follows
    the target's distribution; and three methods, called in this order in each step of decode.py.
    """

    shape, exact = KConfig(()), True

    def __init__(self, device):
        none = torch.zeros(0, dtype=torch.long, device=device)
        self.nothing = Proposal(TokenTree(none, none))

    def propose(self, context, budget, sampling) -> Proposal:
        """A Proposal behind ``context``, a list, if ``budget`` more tokens may be emitted."""
        return self.nothing

    def verify(self, n, proposal, logits, sampling):
        """The Verdict on a proposal behind n positions, by the target's ``logits`` (N+1, V)."""
        return verify(n, proposal.tree, proposal.q, logits, sampling)

    def keep(self, n, proposal, verdict, logits):
        """Roll back to the n positions of context and the path that was accepted."""


class SortedDraft(NoDraft):
    """A draft of sorted ``exits`` (exits.py), the cheapest first, and trees of one ``shape``.

    ``rule`` ends drafting (``LeastProbable``); ``worth_sending``: see GrowingTree.
    """

    def __init__(self, exits, shape, rule, device, dtype, worth_sending=None):
        super().__init__(device)
        self.exits, self.shape, self.rule = exits, shape, rule
        self.device, self.dtype, self.worth_sending = device, dtype, worth_sending
        self.attention = TreeAttention(shape.parents().to(device), dtype)  # of a fixed shape

    def propose(self, context, budget, sampling):
        levels = min(budget - 1, self.space(context))  # the last token is the target's own
        return self.grow(context, levels, sampling)

    def space(self, context):
        """How many levels the draft's own context size allows."""
        return min(each.longest for each in self.exits) - len(context) + 1

    def grow(self, context, max_levels, sampling, roots=None) -> Proposal:
        """A Proposal; ``roots``: the target's prediction for the first level (extras/roots.py)."""
        levels = min(max_levels, self.shape.depth)
        tree = self.new_tree(context, levels, sampling)
        confidences, stopped = [], ""
        while tree.frontier and not stopped:
            expanded = tree.frontier
            if roots:  # from the second level on the draft predicts
                prediction, number, roots = roots, TARGET, None
            else:
                prediction, tried = self.predict(tree)
                number = len(confidences)
                confidences.append(tried)
            if not tree.takes(prediction):
                stopped = LeastProbable.reason
                break
            children = tree.add_level(prediction, number)  # (R, K)
            if self.rule.ends(tree, expanded, prediction, children) and tree.frontier:
                stopped = self.rule.reason
        proposal = tree.proposal(self.worth_sending)
        reached = "length" if levels == self.shape.depth else "context"
        proposal.stopped = stopped or proposal.stopped or reached
        proposal.confidences = confidences
        proposal.filled = [each.filled for each in self.exits]
        return proposal

    def new_tree(self, context, levels, sampling):
        """The tree, before it has grown its first of so many ``levels``."""
        how = self.shape, context, sampling, levels, self.rule.least
        if self.shape.fixed:
            return FixedTree(*how, self.attention)
        rounds, at_once = self.exits[-1].rounds(self.shape, levels)
        return GrowingTree(*how, rounds, at_once, self.device, self.dtype)

    def predict(self, tree):
        """The prediction of the first exit that is sure enough, or of the last; and those tried."""
        tried = []
        for each in self.exits:
            prediction = each.predict(tree)
            tried.append((each.layer, prediction.confidence))
            # This alone decides: no drawn token has a say in its own exit (verify.py's lemma).
            if prediction.confidence > each.threshold:
                break  # the layers behind it are not run
        return prediction, tried

    def keep(self, n, proposal, verdict, logits):
        slots = [proposal.slots[node] for node in verdict.path]
        for each in self.exits:
            each.keep(n, slots)
