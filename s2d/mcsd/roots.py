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

from torch import Tensor

from ..decoder import Decoder
from ..draft import SortedDraft
from ..model import Llama
from ..options import Plan
from ..rules import Greedy, Rejection, Rule, without
from ..sampling import warp
from ..tree import Proposal, Tree


class RootsDecoder(Decoder):
    """A Decoder whose steps emit no bonus token: it becomes the first root of the next tree.

    There it may lose against another root. The first step has no roots, and emits nothing.
    """

    def __init__(
        self, target: Llama, drafter: SortedDraft, rule: Rule, context: list[int], plan: Plan
    ) -> None:
        """Raises ValueError for a rule of the caller's own."""
        if not isinstance(plan.options.rule, str):
            raise ValueError("init='target' goes with rule='noise' or 'rejection'")
        self.roots: list[int] = []  # of the next tree; the first one is the target's choice
        if plan.options.rule == "rejection":
            rule = LongestPath(rule, plan.shape.width(0))
        super().__init__(target, drafter, rule, context, plan)

    def draft(self) -> Tree:
        """As a Decoder's, below a first level of the roots."""
        tree = Tree(self.context)
        if not self.roots:
            return tree
        n = len(self.context)
        tree.add_level([0], Proposal([self.roots], [[1.0] * len(self.roots)]), exit_layer=None)
        # No bonus token needs a position, and the first level costs the draft nothing.
        depth = min(self.plan.shape.depth, self.limit - n, self.drafter.max_positions - n + 1)
        return self.drafter.grow(tree, depth, self.rule)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], list[int]]:
        accepted, [*tokens, bonus] = super().verify(tree, logits)
        self.roots = [bonus]
        if isinstance(self.rule, LongestPath):
            self.roots += self.rule.other_roots(tree, logits, [0, *accepted][-1], bonus)
        return accepted, tokens

    def roll_back(self, tree: Tree, accepted: list[int]) -> None:
        """As a Decoder's. The next pass reads the last token once more, to have its logits."""
        super().roll_back(tree, accepted)
        self.cache.keep(self.cache.length - 1, [])


class LongestPath:
    """Below each root, ``rule`` finds a path. The root with the longest path wins.

    This is as published. It is not lossless, as a root with a longer path wins more often than it
    is probable.
    """

    def __init__(self, rule: Greedy | Rejection, roots: int) -> None:
        self.rule = rule
        self.roots = roots
        self.exact = roots == 1

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        return self.rule.propose(tree, nodes, logits, count)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        logits = logits.cpu()  # so that a GPU is waited for once
        walks = []
        for root in tree.children(0):
            accepted, bonus = self.rule.verify(tree, logits, start=root)
            walks.append(([root, *accepted], bonus))
        if not walks:
            return self.rule.verify(tree, logits)
        return max(walks, key=lambda walk: len(walk[0]))  # of equally long ones, the first

    def other_roots(self, tree: Tree, logits: Tensor, node: int, first: int) -> list[int]:
        """The roots after ``node`` besides ``first``: the target's likeliest tokens, or drawn ones.

        ``logits`` (N+1, V) are the target's.
        """
        count = self.roots - 1
        if count == 0:
            return []
        if isinstance(self.rule, Rejection):
            p = self.rule.distribution(logits[node]).cpu()  # (V,)
            rest = without(p, first)
            others = self.rule.draws.candidates(rest[None], min(count, len(rest) - 1))[0]
        else:
            rest = without(warp(logits[node], temperature=1.0).cpu(), first)
            others = rest.topk(min(count, len(rest))).indices
        return [token for token in others.tolist() if rest[token] > 0]
