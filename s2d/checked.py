"""Exits, rules and shapes of your own: what they promise, checked where they answer.

What is not ours is wrapped once, where decoding is prepared (generation.py). The draft and the loop
see no difference, and check nothing. A ValueError names the promise that is broken. What such a
part is handed is a copy, or cannot be changed. No check looks at values on a GPU, which would have
to be waited for.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from .draft import Exit
from .options import MAX_GROWN, MAX_NODES, short
from .rules import Prediction, Rule
from .stats import Step
from .tree import Proposal, Shape, Tree

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16


def has(value: Any, kind: str, *names: str) -> Any:
    """``value``, if it has these members."""
    for name in names:
        if not hasattr(value, name):
            raise ValueError(f"{kind} has {name}, unlike {short(value)}")
    return value


def whole(number: Any, what: str, low: int, high: float) -> int:
    """The ``number``, if it is a plain int from ``low`` to ``high``."""
    if type(number) is not int or not low <= number <= high:
        expected = f"expected a whole number from {low} to {high}"
        raise ValueError(f"{what}: {expected}, not {short(number)}")
    return number


def are_nodes(nodes: Any) -> bool:
    """Whether ``nodes`` are a list of plain ints: True and 1.0 would pass for node 1."""
    return type(nodes) in (list, tuple) and all(type(node) is int for node in nodes)


class CheckedExit:
    """An exit that has a number, and predicts a row of logits for each node."""

    def __init__(self, exit_: Exit, vocab_size: int) -> None:
        self.exit = has(exit_, "an exit", "exit_layer", "max_positions", "predict", "keep")
        self.vocab_size = vocab_size
        self.exit_layer = whole(exit_.exit_layer, "an exit's number", 0, inf)
        self.max_positions = size = exit_.max_positions
        if not isinstance(size, int | float):
            raise ValueError(f"an exit's max_positions is a number, not {short(size)}")

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
        tree = tree._replace(context=list(tree.context))  # it may go on from the text: text += ...
        prediction = self.exit.predict(tree, list(nodes))
        if not isinstance(prediction, Prediction):
            raise ValueError(f"an exit returns a Prediction, not {short(prediction)}")
        logits, confidence, _ = prediction
        shape = len(nodes), self.vocab_size
        is_right = isinstance(logits, Tensor) and logits.dtype in FLOATS
        if not is_right or logits.shape != shape:
            found = f"{tuple(logits.shape)} in {logits.dtype}" if is_right else short(logits)
            raise ValueError(f"an exit predicts floats of shape {shape}, not {found}")
        if not isinstance(confidence, int | float) or not confidence >= 0:
            raise ValueError(f"an exit's confidence is a number from 0, not {short(confidence)}")
        return prediction

    def keep(self, step: Step) -> None:
        logits, hidden = step.logits.clone(), step.hidden.clone()
        accepted, tokens = list(step.accepted), list(step.tokens)
        self.exit.keep(Step(step.tree, logits, hidden, accepted, tokens))

    def end(self) -> None:
        if hasattr(self.exit, "end"):
            self.exit.end()


class CheckedRule:
    """A rule that proposes tokens of the vocabulary, and accepts a path from the root down."""

    def __init__(self, rule: Rule, prunes: bool) -> None:
        self.rule = has(rule, "a rule", "exact", "propose", "verify")
        self.exact = rule.exact
        self.prunes = prunes

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        size = prediction.logits.shape[1]
        hidden = None if prediction.hidden is None else prediction.hidden.clone()
        prediction = prediction._replace(logits=prediction.logits.clone(), hidden=hidden)
        proposal = self.rule.propose(tree, list(nodes), prediction, list(widths))
        if not isinstance(proposal, Proposal):
            raise ValueError(f"a rule proposes a Proposal, not {short(proposal)}")
        tokens, probs, q = proposal
        of_lists = are_lists(tokens, len(nodes)) and are_lists(probs, len(nodes))
        if not of_lists or [*map(len, tokens)] != [*map(len, probs)]:
            words = f"lists of tokens and estimates for {len(nodes)} nodes, as many of each"
            raise ValueError(f"a rule proposes {words}, not {short(proposal)}")
        for row, width in zip(tokens, widths):
            are_tokens = all(type(token) is int and 0 <= token < size for token in row)
            if not are_tokens or len(row) > width or len(set(row)) < len(row):
                expected = f"up to {width} different tokens of {size}"
                raise ValueError(f"a rule proposes {expected}, not {short(row)}")
        for estimate in sum(probs, []):
            if not isinstance(estimate, int | float) or not estimate >= 0:
                raise ValueError(f"a rule's estimates are numbers from 0, not {short(estimate)}")
        are_rows = isinstance(q, list | tuple) and len(q) in (0, len(nodes))
        if not are_rows or not all(isinstance(row, Tensor) and row.shape == (size,) for row in q):
            raise ValueError(f"a rule's q are {len(nodes)} tensors of {size}, not {short(q)}")
        if q and self.prunes:
            raise ValueError("a rule that draws does not go with a shape that leaves nodes out")
        return proposal

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        found = self.rule.verify(tree, logits.clone())
        if type(found) is not tuple or len(found) != 2 or not are_nodes(found[0]):
            raise ValueError(f"a rule verifies to (accepted nodes, bonus), not {short(found)}")
        accepted, bonus = found
        parent = 0
        for node in accepted:
            if node not in range(1, len(tree.tokens)) or tree.parents[node] != parent:
                raise ValueError(f"a rule accepts a path from the root down, not {short(accepted)}")
            parent = node
        return list(accepted), whole(bonus, "a bonus token", 0, logits.shape[1] - 1)


def are_lists(rows: Any, count: int) -> bool:
    """Whether ``rows`` are so many lists."""
    return isinstance(rows, list) and len(rows) == count and all(type(row) is list for row in rows)


class CheckedShape:
    """A shape whose trees are not too large, and which sends the root, and others with parents."""

    def __init__(self, shape: Shape) -> None:
        self.shape = has(shape, "a shape", "depth", "prunes", "frontier", "width", "sent")
        self.depth = whole(shape.depth, "the depth of a tree", 1, MAX_NODES)
        self.prunes = bool(shape.prunes)

    def frontier(self, tree: Tree, leaves: list[int]) -> list[int]:
        nodes = self.shape.frontier(tree, list(leaves))
        if not are_nodes(nodes) or [leaf for leaf in leaves if leaf in nodes] != list(nodes):
            raise ValueError(f"a frontier is some of {short(leaves)} in order, not {short(nodes)}")
        grown = len(tree.tokens) + sum(self.width(tree, node) for node in nodes)
        whole(grown, "the nodes of a tree before it is cut", 1, MAX_GROWN)
        return list(nodes)

    def width(self, tree: Tree, node: int) -> int:
        return whole(self.shape.width(tree, node), "the width of a tree", 1, MAX_NODES)

    def sent(self, tree: Tree) -> list[int]:
        nodes = self.shape.sent(tree)
        kept = set(nodes) if are_nodes(nodes) else set()
        count = len(tree.tokens)
        ascending = kept and list(nodes) == sorted(kept) and nodes[0] == 0 and nodes[-1] < count
        if not ascending or not all(tree.parents[node] in kept for node in nodes[1:]):
            raise ValueError(f"nodes are sent in order, with their parents: not {short(nodes)}")
        if len(nodes) < count and not self.prunes:
            raise ValueError("a shape leaves nodes out, though it says that it does not prune")
        whole(len(nodes) - 1, "the nodes of a tree", 0, MAX_NODES)
        return list(nodes)
