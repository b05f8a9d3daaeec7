"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position, and so the first level
of the next tree, which the draft only extends (improved MCSD, arXiv 2409.10644, "target
initialized"). The paper calls the tokens of this level roots. Here they are the children of node 0.

With ``rule="rejection"`` there are several roots, as published: what the rule would propose if the
target were the draft. With shared noise there is one root, the token that the target takes, and the
text stays the target's own.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..decoder import Decoder
from ..draft import SortedDraft
from ..model import Llama
from ..options import Options
from ..rules import Prediction, Rule
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
    ) -> None:
        if not isinstance(options.rule, str):
            raise ValueError("init='target' goes with rule='noise' or 'rejection'")
        super().__init__(target, drafter, rule, context, options)
        self.root_rule = rule
        self.roots: list[int] = []  # of the next tree; the first one is the target's choice
        self.count = 1
        if options.rule == "rejection":
            self.count = drafter.shape.width(Tree.root(context), 0)
            self.rule = LongestPath(rule, self.count)

    def draft(self) -> Tree:
        """As a Decoder's, below a first level of the roots."""
        tree = Tree.root(self.context)
        if not self.roots:
            return tree
        level = Proposal([self.roots], [[1.0] * len(self.roots)])
        tree = tree.add_level([0], level, exit_layer=TARGET)
        # No bonus token needs a position, and the first level costs the draft nothing.
        n = len(self.context)
        depth = min(self.drafter.shape.depth, self.limit - n, self.drafter.max_positions - n + 1)
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
        if self.count > 1:
            last = [0, *step.accepted][-1]
            said = Prediction(step.logits[[last]], confidence=1.0)
            [likely] = self.root_rule.propose(step.tree, [last], said, [self.count]).tokens
            others = [token for token in likely if token != self.roots[0]]
            self.roots += others[: self.count - 1]


class LongestPath:
    """No root is tested. The one with the longest path that ``rule`` accepts below it wins.

    With several roots this is not lossless: a long path makes its root win too often.
    """

    def __init__(self, rule: Rule, roots: int) -> None:
        self.rule = rule
        self.exact = roots == 1
        self.propose = rule.propose

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        logits = logits.cpu()  # so that a GPU is waited for once
        walks = []
        for root in tree.children(0):
            nodes = np.flatnonzero(tree.ancestors[:, root]).tolist()  # the root and all below it
            accepted, bonus = self.rule.verify(tree.prune(nodes), logits[nodes])
            walks.append(([root, *(nodes[each] for each in accepted)], bonus))
        if not walks:
            return self.rule.verify(tree, logits)
        return max(walks, key=lambda walk: len(walk[0]))  # of equally long ones, the first
