"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position. Its likeliest tokens, or
several that are drawn from it, become the roots, and the draft only extends them (Improved MCSD,
arXiv 2409.10644, "target initialized"). As published, every root counts as accepted and the longest
path below one wins: not lossless, unless there is one root. With shared noise it is.
"""

import torch

from ..decode import Decoder
from ..sampling import warp
from ..tree import CONTEXT, KConfig, Tree
from ..verify import verify, without


class RootsDecoder(Decoder):
    """A Decoder whose first step only finds roots.

    No step emits its bonus token: that is the first root of the next tree, and may yet lose.
    """

    def __init__(self, target, draft, context, limit, sampling):
        super().__init__(target, draft, context, limit, sampling)
        self.roots = None  # of the next tree: tokens (K,) and their probabilities (K,)
        self.after_context = None  # logits (V,) of the last pass, after what was accepted
        self.exact = sampling.coupled or draft.shape.widths[0] == 1

    def draft_tree(self):
        if self.roots is None:
            return Tree(self.context, KConfig(()), max_levels=0)
        n, draft = len(self.context), self.draft_model
        levels = min(self.limit - n, draft.max_positions - n + 1)
        tree = Tree(self.context, draft.shape, max(1, levels), draft.min_prob)
        tokens, probs = self.roots
        tree.add_level([tokens.tolist()], [probs.tolist()], exit=None)
        if not self.sampling.coupled and not self.sampling.greedy:
            # The row of q for the context's children: nobody reads it, as a root faces no test.
            tree.q.append(self.after_context.new_zeros(1, self.sampling.vocab_size))
        draft.grow(tree, self.sampling)
        return tree

    def accept(self, logits):
        if self.after_context is not None:  # the target has seen the context: its row is known
            logits = torch.cat((self.after_context[None], logits))
        return super().accept(logits)

    def verify(self, logits):
        tokens, parents = self.tree.part(self.tree.sent)
        roots = [node for node, parent in enumerate(parents) if parent == CONTEXT]
        if roots and not self.sampling.coupled:
            walks = [self.walk_below(root, tokens, parents, logits) for root in roots]
            path, bonus = max(walks, key=lambda walk: len(walk[0]))
        else:
            n = len(self.context)
            path, bonus = verify(n, tokens, parents, None, logits, self.sampling)
        self.after_context = logits[path[-1] + 1 if path else 0]
        position = len(self.context) + len(path)
        count = self.draft_model.shape.widths[0]
        self.roots = next_roots(bonus, self.after_context, count, self.sampling, position)
        return path, [tokens[node] for node in path]

    def walk_below(self, root, tokens, parents, logits):
        """The path from ``root`` on that is accepted in the tree below it, and the bonus token."""
        nodes = [root]
        for node in range(root + 1, len(tokens)):
            if parents[node] in nodes:
                nodes.append(node)
        place = {node: i - 1 for i, node in enumerate(nodes)}  # of the root: CONTEXT
        q = None
        if self.tree.q:
            q = torch.cat(self.tree.q)
            q = q[[node + 1 for node in nodes if node + 1 < len(q)]]  # leaves have none
        path, bonus = verify(
            len(self.context) + 1,
            [tokens[node] for node in nodes[1:]],
            [place[parents[node]] for node in nodes[1:]],
            q,
            logits[[node + 1 for node in nodes]],
            self.sampling,
        )
        return [root, *(nodes[i + 1] for i in path)], bonus


def next_roots(first, logits, count, sampling, position):
    """``count`` roots: the token ``first``, then others by the target's ``logits`` (V,)."""
    tokens = torch.tensor([first], device=logits.device)
    probs = warp(logits, 1.0) if sampling.greedy else sampling.warp(logits)
    if count > 1:
        rest = without(probs, first)
        if sampling.greedy:
            others = rest.topk(count - 1).indices
        elif sampling.coupled:
            others = (rest / sampling.noise([position])[0]).topk(count - 1).indices
        else:
            others = sampling.candidates(rest[None], count - 1)[0]
        # A token of probability 0 is no root: the first one takes its slot.
        tokens = torch.cat((tokens, others.where(rest[others] > 0, first)))
    if sampling.coupled:  # the target's choice is known: no other root will be taken
        return tokens, (torch.arange(count) == 0).double()
    return tokens, probs[tokens]
