"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position. Its likeliest tokens, or
several that are drawn from it, become the roots, and the draft only extends them (Improved MCSD,
arXiv 2409.10644, "target initialized"). As published, every root counts as accepted and the longest
path below one wins: not lossless, unless there is one root. With shared noise it is.
"""

import torch

from ..decode import Decoder
from ..sampling import warp
from ..tree import KConfig, Tree
from ..verify import without


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
        n, draft = len(self.context), self.drafter
        levels = min(self.limit - n, draft.max_positions - n + 1)
        tree = Tree(self.context, draft.shape, max(1, levels), draft.min_prob)
        tokens, probs = self.roots
        tree.add_level([tokens.tolist()], [probs.tolist()], exit=None)
        if not self.sampling.coupled and not self.sampling.greedy:  # uniform: see ``verify``
            tree.q.append(torch.zeros_like(self.after_context)[None].softmax(dim=-1))
        draft.grow(tree, self.sampling)
        return tree

    def accept(self, logits):
        if self.after_context is not None:  # the target has seen the context: its row is known
            logits = torch.cat((self.after_context[None], logits))
        return super().accept(logits)

    def verify(self, logits):
        if self.roots is None or self.sampling.coupled:
            path, tokens = super().verify(logits)
        else:
            path = []
            for root in dict.fromkeys(self.roots[0].tolist()):
                sure = logits.clone()  # of a target that is sure of this root, and accepts it
                sure[0] = -torch.inf
                sure[0, root] = 0.0
                found, found_tokens = super().verify(sure)
                if len(found) > len(path):
                    path, tokens = found, found_tokens
        self.after_context = logits[path[-1] + 1 if path else 0]
        self.roots = self.next_roots(tokens[-1])
        return path, tokens[:-1]

    def next_roots(self, first):
        """The token ``first``, then others by the target: tokens and probabilities (K,)."""
        sampling, others = self.sampling, self.drafter.shape.widths[0] - 1
        logits = self.after_context
        probs = warp(logits, 1.0) if sampling.greedy else sampling.warp(logits)
        rest = without(probs, first)
        if sampling.greedy or sampling.coupled:
            tokens = rest.topk(others).indices
        else:
            tokens = sampling.candidates(rest[None], others)[0, :others]
        # A token of probability 0 is no root: the first one takes its slot.
        tokens = tokens.where(rest[tokens] > 0, first)
        tokens = torch.cat((tokens.new_tensor([first]), tokens))
        if sampling.coupled:  # the target's choice is known: no other root will be taken
            return tokens, (torch.arange(len(tokens)) == 0).double()
        return tokens, probs[tokens]
