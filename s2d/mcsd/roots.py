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

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..decoder import Decoder
from ..draft import SortedDraft
from ..model import Llama
from ..options import Options
from ..rules import Prediction, Rule, without
from ..sampling import Draws, warp
from ..stats import Step
from ..tree import TARGET, Proposal, Tree


class RootsDecoder(Decoder):
    """A Decoder whose steps emit no bonus token: it becomes the first root of the next tree.

    There it may lose against another root. The first step has no roots, and emits nothing.
    """

    def __init__(
        self,
        target: Llama,
        drafter: SortedDraft,
        rule: Rule,
        context: Sequence[int],
        options: Options,
        draws: Draws,
    ) -> None:
        """Raises ValueError for a rule of the caller's own."""
        if not isinstance(options.rule, str):
            raise ValueError("init='target' goes with rule='noise' or 'rejection'")
        self.roots: list[int] = []  # of the next tree; the first one is the target's choice
        self.count = 1
        if options.rule == "rejection":
            self.count = drafter.shape.width(Tree.root(context), 0)
            rule = LongestPath(rule, self.count)
        self.draws = draws
        super().__init__(target, drafter, rule, context, options)

    def draft(self) -> Tree:
        """As a Decoder's, below a first level of the roots."""
        self.read_long_prompt()
        tree = Tree.root(self.context)
        if not self.roots:
            return tree
        n = len(self.context)
        estimates = [1.0] * len(self.roots)
        tree = tree.add_level([0], Proposal([self.roots], [estimates]), exit_layer=TARGET)
        # No bonus token needs a position, and the first level costs the draft nothing.
        shape = self.drafter.shape
        depth = min(shape.depth, self.limit - n, self.drafter.max_positions - n + 1)
        tree = self.drafter.grow(tree, depth, self.rule)
        if tree.tokens[1:2] != (self.roots[0],):
            raise ValueError("a shape leaves out the token that the target has chosen")
        return tree

    def new_tokens(self, tree: Tree, accepted: list[int], bonus: int) -> list[int]:
        self.roots = [bonus]
        return super().new_tokens(tree, accepted, bonus)[:-1]

    def roll_back(self, step: Step) -> None:
        """As a Decoder's. The next pass reads the last token once more, to have its logits."""
        super().roll_back(step)
        self.cache.keep(self.cache.length - 1, [])
        if self.count > 1 and not self.ended:
            self.roots += self.other_roots(step.logits[[0, *step.accepted][-1]])

    def other_roots(self, logits: Tensor) -> list[int]:
        """The roots besides the first: the target's likeliest tokens, or drawn ones.

        ``logits`` (V,) are the target's.
        """
        options = self.options
        p = warp(logits, options.temperature or 1.0, options.top_p, options.top_k)
        rest = without(p.cpu(), self.roots[0])
        count = min(self.count - 1, len(rest) - 1)
        if options.temperature == 0:
            others = rest.topk(count).indices
        else:
            others = self.draws.candidates(rest[None], count)[0]
        return [token for token in others.tolist() if rest[token] > 0]


class LongestPath:
    """Below each root, ``rule`` finds a path. The root with the longest path wins.

    This is as published. It is not lossless, as a root with a longer path wins more often than it
    is probable.
    """

    def __init__(self, rule: Rule, roots: int) -> None:
        self.rule = rule
        self.exact = roots == 1

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        return self.rule.propose(tree, nodes, prediction, widths)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        logits = logits.cpu()  # so that a GPU is waited for once
        walks = []
        for root in tree.children(0):
            nodes = np.flatnonzero(tree.ancestors[:, root]).tolist()  # the root and all below it
            accepted, bonus = self.rule.verify(below(tree, nodes), logits[nodes])
            walks.append(([root, *(nodes[each] for each in accepted)], bonus))
        if not walks:
            return self.rule.verify(tree, logits)
        return max(walks, key=lambda walk: len(walk[0]))  # of equally long ones, the first


def below(tree: Tree, nodes: list[int]) -> Tree:
    """The ``nodes`` alone, which are a child of the root and all below it: it becomes the root."""
    part = tree.prune(nodes)
    depths = tuple(depth - 1 for depth in part.depths)
    return part._replace(context=(*tree.context, part.tokens[0]), depths=depths)
