"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position. Its likeliest tokens, or
several that are drawn from it, become the roots, and the draft only extends them (Improved MCSD,
arXiv 2409.10644, "target initialized"). As published, every root counts as accepted and the longest
path below one wins: that is not lossless, unless there is one root. With shared noise it is, since
then only the root that the target takes is accepted.
"""

import time

import torch
from torch import Tensor

from .decoder import NOTHING, Decoder, Step, check_finite
from .rules import Rejection, without
from .tree import Tree


class RootsDecoder(Decoder):
    """A Decoder whose first step only finds roots.

    No step emits its bonus token: that is the first root of the next tree, and may yet lose.
    """

    def __init__(self, target, drafter, rule, context, limit, options):
        super().__init__(target, drafter, rule, context, limit, options)
        self.every_root_counts = not options.coupled
        self.exact = options.coupled or drafter.shape.widths[0] == 1
        self.roots: list[int] = []  # of the next tree
        self.probs: list[float] = []  # of these
        self.after_context: Tensor | None = None  # logits (V,) for the token after the context

    def draft(self) -> Tree:
        n = len(self.context)
        if not self.roots:
            tree = Tree(self.context, NOTHING, max_levels=0)
        else:
            levels = min(self.limit - n, self.drafter.max_positions - n + 1)
            tree = self.drafter.new_tree(self.context, max(1, levels))
            tree.add_level([self.roots], [self.probs], exit_layer=None)
            self.drafter.grow(tree, self.rule)
        tree.drafted_at = time.perf_counter()
        return tree

    def accept(self, tree: Tree, logits: Tensor) -> Step:
        check_finite(logits)
        scored_at = time.perf_counter()
        if self.every_root_counts:
            logits = logits.cpu()  # the tree is walked once for each root
        if self.after_context is not None:
            # The target has read all of the context before, so this pass began with the roots.
            logits = torch.cat((self.after_context[None], logits))
        if self.every_root_counts and tree.sent:
            accepted, bonus = self.longest_path(tree, logits)
        else:
            accepted, bonus = self.rule.verify(tree, logits)
        self.roll_back(tree, accepted)
        last_row = 1 + accepted[-1] if accepted else 0
        self.after_context = logits[last_row]
        self.choose_roots(bonus)
        tokens = [tree.tokens[tree.sent[place]] for place in accepted]
        return self.emit(tree, logits, accepted, tokens, scored_at)

    def longest_path(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        """The longest of the paths that are accepted below each root, and its bonus token."""
        tokens, parents = tree.part(tree.sent)
        place_of_root: dict[int, int] = {}
        for place, (token, parent) in enumerate(zip(tokens, parents)):
            if parent == -1:
                place_of_root.setdefault(token, place)  # a root that is there twice counts once
        walks = []
        for place in place_of_root.values():
            accepted, bonus = self.rule.verify(tree, logits, start=place)
            walks.append(([place, *accepted], bonus))
        return max(walks, key=lambda walk: len(walk[0]))  # of equally long ones, the first

    def choose_roots(self, first: int) -> None:
        """The roots of the next tree: ``first``, which the target has taken, then others."""
        count = self.drafter.shape.widths[0]
        p = self.rule.distribution(self.after_context).cpu()  # (V,)
        rest = without(p, first)
        if count == 1:
            others = torch.tensor([], dtype=torch.long, device="cpu")
        elif isinstance(self.rule, Rejection):
            others = self.rule.draws.candidates(rest[None], count - 1)[0]
        else:
            others = rest.topk(count - 1).indices
        # A token that is not possible is no root: the first one takes its place.
        others = torch.where(rest[others] > 0, others, first)
        self.roots = [first, *others.tolist()]
        if self.every_root_counts:
            self.probs = p[self.roots].tolist()
        else:  # the target's choice is known: it will take no other root
            self.probs = [1.0] + [0.0] * (count - 1)
