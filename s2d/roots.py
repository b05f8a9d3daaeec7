"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position, and so the first token
of the next tree, which the draft only extends (Improved MCSD, arXiv 2409.10644, "target
initialized"). As published, with ``rule="rejection"``, there are several such roots: the target's
likeliest tokens or, above temperature 0 in trees of a fixed shape, tokens that are drawn. Every
root counts as accepted, and the longest path below one wins (``LongestPath``): that is not
lossless, unless there is one root. With shared noise there is one, the token that the target takes,
and the text stays its own.
"""

import time
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from .decoder import Decoder, Step, check_finite
from .mask import CONTEXT
from .rules import Greedy, Prediction, Proposal, Rejection, TargetDraws, without
from .tree import Tree, empty_tree


class RootsDecoder(Decoder):
    """A Decoder whose first step only finds roots.

    No step emits its bonus token: that is the first root of the next tree, and may yet lose.
    """

    roots: Sequence[int] = ()  # of the next tree; the first one is the target's choice
    after_context: Tensor | None = None  # logits (V,) for the token after the context

    def make_tree(self) -> Tree:
        n = len(self.context)
        if not self.roots:
            return empty_tree(self.context)
        # One level more than a Decoder's: no bonus token needs a position. The first level, the
        # roots, costs the draft nothing, so there is always room for it.
        levels = min(self.limit - n, self.drafter.max_positions - n + 1)
        tree = self.drafter.new_tree(self.context, max(1, levels))
        # All of them count as accepted.
        tree.add_level([list(self.roots)], [[1.0] * len(self.roots)], exit_layer=None)
        self.drafter.grow(tree, self.rule)
        return tree

    def accept(self, tree: Tree, logits: Tensor) -> Step:
        """As a Decoder's, but ``logits`` are (N, V) after the first step."""
        check_finite(logits)
        self.scored_at = time.perf_counter()
        if self.after_context is not None:
            # The target had read all of the context, so its logits are only after the nodes.
            logits = torch.cat((self.after_context[None], logits))
        accepted, bonus = self.verify(tree, logits)
        self.roll_back(tree, accepted)
        last_row = 1 + accepted[-1] if accepted else 0
        self.after_context = logits[last_row]
        self.choose_roots(bonus)
        tokens = [tree.tokens[node] for node in accepted]
        return self.emit(tree, logits, accepted, tokens)

    def choose_roots(self, bonus: int) -> None:
        """The roots of the next tree, of which the target has already taken ``bonus``."""
        self.roots = [bonus]
        if isinstance(self.rule, LongestPath):
            p = self.rule.distribution(self.after_context).cpu()  # (V,)
            count = self.drafter.shape.width(0)
            self.roots = [bonus, *self.rule.other_roots(p, bonus, count - 1)]


class LongestPath:
    """Every root counts as accepted. Below each, ``rule`` finds a path; the longest wins.

    As published, and not lossless: of two roots the one with the longer path is more probable.
    """

    def __init__(self, rule: Rejection | TargetDraws | Greedy, roots: int) -> None:
        self.rule = rule
        self.exact = roots == 1

    def distribution(self, logits: Tensor) -> Tensor:
        return self.rule.distribution(logits)

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        return self.rule.propose(prediction, count, positions)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        logits = logits.cpu()
        walks = []
        for root in tree.children(CONTEXT):
            nodes, below = subtree(tree, root)
            rows = [node + 1 for node in (root, *nodes)]
            accepted_below, bonus = self.rule.verify(below, logits[rows])
            walks.append(([root, *(nodes[inner] for inner in accepted_below)], bonus))
        if not walks:
            return self.rule.verify(tree, logits)
        return max(walks, key=lambda walk: len(walk[0]))  # of equally long ones, the first

    def other_roots(self, p: Tensor, first: int, count: int) -> list[int]:
        """Up to ``count`` tokens of p (V,) besides ``first``: the likeliest, or drawn without
        replacement.
        """
        rest = without(p, first)
        if count == 0:
            return []
        if isinstance(self.rule, Rejection):
            others = self.rule.draws.candidates(rest[None], count)[0]
        else:
            others = rest.topk(min(count, len(rest))).indices
        return [token for token in others.tolist() if rest[token] > 0]


def subtree(tree: Tree, root: int) -> tuple[list[int], Tree]:
    """The nodes below ``root``, and a tree of these for a rule to verify."""
    inside = {root}
    for node, parent in enumerate(tree.parents):
        if parent in inside:
            inside.add(node)
    nodes = sorted(inside - {root})
    below = copy(tree)
    below.restrict_to(nodes, root)
    return nodes, below
