"""Exits, rules and shapes of your own: what they promise, checked where they answer.

What is not ours is wrapped once, where decoding is prepared (generation.py). The draft and the loop
see no difference, and check nothing. A ValueError names the promise that is broken. What such a
part is handed is a copy, or cannot be changed; only the q that a rule has proposed is its own. No
check looks at values on a GPU, which would have to be waited for.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from torch import Tensor

from .draft import Exit
from .options import MAX_GROWN, MAX_NODES, expect
from .rules import Prediction, Rule
from .stats import Step
from .tree import Proposal, Shape, Tree


def whole(value: Any, what: str, low: int, high: float) -> int:
    """The ``value``, if it is a plain int from ``low`` to ``high``."""
    is_right = type(value) is int and low <= value <= high
    expect(is_right, f"{what}: expected a whole number from {low} to {high}", value)
    return value


def are_ints(values: Any) -> bool:
    """Whether ``values`` are a list of plain ints: True and 1.0 would pass for node 1."""
    return type(values) in (list, tuple) and all(type(value) is int for value in values)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a plain number from 0."""
    return isinstance(value, int | float) and value >= 0


def without_q(tree: Tree) -> Tree:
    """The ``tree`` for a part that needs no q: whoever writes into q would change the law."""
    return tree._replace(q=(None,) * len(tree.tokens))


class CheckedExit:
    """An exit that has a number, and predicts a row of logits for each node."""

    def __init__(self, exit_: Exit, vocab_size: int) -> None:
        self.exit = exit_
        self.vocab_size = vocab_size
        self.exit_layer = whole(exit_.exit_layer, "an exit's number", 0, inf)
        self.max_positions = exit_.max_positions
        words = "an exit's max_positions is a number"
        expect(is_number(self.max_positions), words, self.max_positions)

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
        tree = without_q(tree)._replace(context=list(tree.context))  # so that a list can be added
        said = self.exit.predict(tree, list(nodes))
        expect(isinstance(said, Prediction), "an exit returns a Prediction", said)
        logits = said.logits
        shape = len(nodes), self.vocab_size
        is_right = isinstance(logits, Tensor) and logits.is_floating_point()
        found = (tuple(logits.shape), logits.dtype) if is_right else logits
        is_right = is_right and logits.shape == shape
        expect(is_right, f"an exit predicts floats of shape {shape}", found)
        words = "an exit's confidence is a number from 0"
        expect(is_number(said.confidence), words, said.confidence)
        return said

    def keep(self, step: Step) -> None:
        logits, hidden = step.logits.clone(), step.hidden.clone()
        accepted, tokens = list(step.accepted), list(step.tokens)
        self.exit.keep(Step(without_q(step.tree), logits, hidden, accepted, tokens))

    def end(self) -> None:
        if hasattr(self.exit, "end"):
            self.exit.end()


class CheckedRule:
    """A rule that proposes tokens of the vocabulary, and accepts a path from the root down."""

    def __init__(self, rule: Rule, prunes: bool) -> None:
        self.rule = rule
        self.exact = rule.exact
        self.prunes = prunes

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        size = prediction.logits.shape[1]
        hidden = None if prediction.hidden is None else prediction.hidden.clone()
        prediction = prediction._replace(logits=prediction.logits.clone(), hidden=hidden)
        proposal = self.rule.propose(tree, list(nodes), prediction, list(widths))
        expect(isinstance(proposal, Proposal), "a rule proposes a Proposal", proposal)
        tokens, probs, q = proposal
        of_lists = isinstance(tokens, list) and isinstance(probs, list)
        of_lists = of_lists and len(tokens) == len(probs) == len(nodes)
        of_lists = of_lists and all(type(row) is list for row in tokens + probs)
        words = f"a rule proposes lists of tokens and estimates for {len(nodes)} nodes"
        expect(of_lists, words, proposal)
        for row, estimates, width in zip(tokens, probs, widths):
            is_right = are_ints(row) and all(0 <= token < size for token in row)
            is_right = is_right and len(set(row)) == len(row) <= width
            expect(is_right, f"a rule proposes up to {width} different tokens of {size}", row)
            is_right = len(estimates) == len(row) and all(map(is_number, estimates))
            words = f"a rule's estimates are {len(row)} numbers from 0"
            expect(is_right, words, estimates)
        is_right = isinstance(q, list | tuple) and len(q) in (0, len(nodes))
        is_right = is_right and all(isinstance(row, Tensor) and row.shape == (size,) for row in q)
        expect(is_right, f"a rule's q are {len(nodes)} tensors of {size}", q)
        if q and self.prunes:
            raise ValueError("a rule that draws does not go with a shape that leaves nodes out")
        return proposal

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        found = self.rule.verify(tree, logits.clone())
        is_right = type(found) is tuple and len(found) == 2 and are_ints(found[0])
        expect(is_right, "a rule verifies to (accepted nodes, bonus)", found)
        accepted, bonus = found
        for parent, node in zip([0, *accepted], accepted):
            is_child = 0 < node < len(tree.tokens) and tree.parents[node] == parent
            expect(is_child, "a rule accepts a path from the root down", accepted)
        return list(accepted), whole(bonus, "a bonus token", 0, logits.shape[1] - 1)


class CheckedShape:
    """A shape whose trees are not too large, and which sends the root, and others with parents."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.depth = whole(shape.depth, "the depth of a tree", 1, MAX_NODES)
        self.prunes = bool(shape.prunes)

    def frontier(self, tree: Tree, leaves: list[int]) -> list[int]:
        nodes = self.shape.frontier(without_q(tree), list(leaves))
        is_right = are_ints(nodes) and [leaf for leaf in leaves if leaf in nodes] == list(nodes)
        expect(is_right, f"a frontier is some of {leaves} in order", nodes)
        grown = len(tree.tokens) + sum(self.width(tree, node) for node in nodes)
        most = MAX_GROWN if self.prunes else MAX_NODES
        whole(grown - 1, "the nodes of a tree before it is cut", 0, most)
        return list(nodes)

    def width(self, tree: Tree, node: int) -> int:
        width = self.shape.width(without_q(tree), node)
        return whole(width, "the width of a tree", 1, MAX_NODES)

    def sent(self, tree: Tree) -> list[int]:
        nodes = self.shape.sent(without_q(tree))
        count = len(tree.tokens)
        kept = {0, *nodes} & set(range(count)) if are_ints(nodes) else set()
        is_right = kept and list(nodes) == sorted(kept)
        is_right = is_right and all(tree.parents[node] in kept for node in nodes[1:])
        expect(is_right, "nodes are sent in order, with their parents", nodes)
        whole(len(nodes) - 1, "the nodes of a tree", 0, MAX_NODES)
        return list(nodes)
