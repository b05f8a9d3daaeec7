"""Target-initialised roots: the first level of each tree comes from the target itself.

The last pass already gave the target's distribution for the next position, and so the first level
of the next tree, which the draft only extends (improved MCSD, arXiv 2409.10644, "target
initialized"). The paper calls the tokens of this level roots. Here they are the root's children.

It is given as ``generate(..., decoder=RootsDecoder)``. With ``rule="rejection"`` there are several
roots, as published: what the rule would propose if the target were the draft. With shared noise
there is one root, the token that the target takes, and the text stays the target's own.
"""

import copy
from typing import Any

from torch import Tensor

from ..decoder import Decoder
from ..rules import Prediction, Rule
from ..stats import Step
from ..tree import TARGET, Node, Tree


class RootsDecoder(Decoder):
    """A Decoder whose steps emit no bonus token: it becomes the first root of the next tree.

    There it may lose against another root. The first step has no roots, and emits nothing.
    """

    def __init__(self, **parts: Any) -> None:
        """``parts`` as of a Decoder; ValueError for a rule of one's own."""
        super().__init__(**parts)
        if not isinstance(self.options.rule, str):
            raise ValueError("target-initialised roots go with rule='noise' or 'rejection'")
        self.root_rule = self.rule
        self.roots: list[int] = []  # of the next tree; the first one is the target's choice
        self.count = 1
        if self.options.rule == "rejection" and self.options.exits:
            self.count = self.options.tree.width(Node(self.context[-1]))
            self.rule = LongestPath(self.root_rule, self.count)

    def draft(self) -> Tree:
        """As a Decoder's, below a first level of the roots."""
        tree = Tree(self.context, self.options.tree)
        if not self.roots:
            return tree
        roots = [tree.root.child(token, 1.0, TARGET) for token in self.roots]
        tree.add_level([tree.root], roots)
        # No bonus token needs a position, and the first level costs the draft nothing.
        room = self.limit - len(self.context)
        self.drafter.grow(tree, min(tree.shape.depth, room), self.rule)
        if roots[0] not in tree.nodes:
            raise ValueError("a shape leaves out the token that the target has chosen")
        return tree

    def emit(self, accepted: list[Node], tokens: list[int]) -> tuple[list[Node], list[int]]:
        """As a Decoder's, but the bonus token is the first root."""
        self.roots = tokens[-1:]
        return super().emit(accepted, tokens[:-1])

    def roll_back(self, step: Step) -> None:
        """As a Decoder's. The next pass reads the last token once more, to have its logits."""
        super().roll_back(step)
        self.cache.keep(self.cache.length - 1, [])
        if self.count > 1:
            last = [step.tree.root, *step.accepted][-1]
            said = Prediction(step.logits[[step.tree.nodes.index(last)]], confidence=1.0)
            tokens, estimates, _ = self.root_rule.propose(step.tree, [last], said, self.count)
            likely = tokens[estimates > 0].tolist()
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

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[Node], int]:
        walks = []
        for root in tree.children(tree.root):
            rows = [row for row, node in enumerate(tree.nodes) if root in node.path]
            below = copy.copy(tree)  # the root and all nodes below it
            below.nodes = [tree.nodes[row] for row in rows]
            accepted, bonus = self.rule.verify(below, logits[rows])
            walks.append(([root, *accepted], bonus))
        if not walks:
            return self.rule.verify(tree, logits)
        return max(walks, key=lambda walk: len(walk[0]))  # of equally long ones, the first
