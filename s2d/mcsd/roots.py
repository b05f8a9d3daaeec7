"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position, and so the first level
of the next tree, which the draft only extends (improved MCSD, arXiv 2409.10644, "target
initialized"). The paper calls the tokens of this level roots. Here they are the children of node 0.

As published, with ``rule="rejection"``, there are several roots: the target's likeliest tokens or,
above temperature 0 in trees of a fixed shape, tokens that are drawn from its distribution. No root
is tested, and the root with the longest accepted path below it wins (``LongestPath``). With several
roots this is not lossless. With shared noise there is one root, the token that the target takes,
and the text stays the target's own.
"""

from copy import copy
from typing import Any

from torch import Tensor

from ..decoder import Decoder
from ..rules import Prediction, Proposal, Rejection, Rule, without
from ..tree import Tree


class RootsDecoder(Decoder):
    """A Decoder whose steps emit no bonus token: it becomes the first root of the next tree.

    There it may lose against another root. The first step has no roots, and emits nothing.
    """

    def __init__(self, *arguments: Any, longest: "LongestPath | None") -> None:
        """``arguments``: of a Decoder. ``longest``: the rule that finds several roots, if any."""
        super().__init__(*arguments)
        self.longest = longest
        self.roots: list[int] = []  # of the next tree; the first one is the target's choice

    def draft(self) -> Tree:
        """As a Decoder's, below a first level of the roots."""
        if not self.roots:
            return self.drafter.new_tree(self.context, max_depth=0)
        # There is one level more than in a Decoder's tree, as no bonus token needs a position. The
        # first level costs the draft nothing, so there is always room for it.
        tree = self.drafter.new_tree(self.context, self.limit - len(self.context))
        if not tree.frontier:
            tree = Tree(self.context, self.drafter.shape, max_depth=1)
        tree.add_level([self.roots], [[1.0] * len(self.roots)], exit_layer=None)
        return self.drafter.grow(tree, self.rule)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        accepted, bonus = self.rule.verify(tree, logits)
        self.roots = [bonus]
        if self.longest is not None:
            after_path = logits[accepted[-1] if accepted else 0]
            p = self.options.distribution(after_path).cpu()  # (V,)
            self.roots += self.longest.other_roots(p, first=bonus)
        return accepted, [tree.tokens[node] for node in accepted]

    def roll_back(self, tree: Tree, accepted: list[int]) -> None:
        """As a Decoder's. The next pass reads the last token once more, to have its logits."""
        super().roll_back(tree, accepted)
        self.cache.keep(self.cache.length - 1, [])


class LongestPath:
    """Below each root, ``rule`` finds a path. The root with the longest path wins.

    This is as published. It is not lossless, as a root with a longer path wins more often than it
    is probable.
    """

    def __init__(self, rule: Rule, roots: int) -> None:
        self.rule = rule
        self.roots = roots
        self.exact = roots == 1

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        return self.rule.propose(prediction, count, positions)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        logits = logits.cpu()  # so that a GPU is waited for once
        walks = []
        for root in tree.children(0):
            nodes = [node for node, row in enumerate(tree.ancestors) if row[root]]
            below = copy(tree)
            below.restrict_to(nodes)  # ``root`` is node 0 of this tree
            accepted, bonus = self.rule.verify(below, logits[nodes])
            walks.append(([root, *(nodes[node] for node in accepted)], bonus))
        if not walks:
            return self.rule.verify(tree, logits)
        return max(walks, key=lambda walk: len(walk[0]))  # of equally long ones, the first

    def other_roots(self, p: Tensor, first: int) -> list[int]:
        """The roots besides ``first``: the likeliest tokens of p (V,), or drawn ones."""
        count = self.roots - 1
        if count == 0:
            return []
        rest = without(p, first)
        if isinstance(self.rule, Rejection):
            others = self.rule.draws.candidates(rest[None], min(count, len(rest) - 1))[0]
        else:
            others = rest.topk(min(count, len(rest))).indices
        return [token for token in others.tolist() if rest[token] > 0]
