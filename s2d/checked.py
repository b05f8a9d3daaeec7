"""Exits, rules and shapes of your own: what they promise, checked where they answer.

What is not ours is wrapped once, where decoding is prepared (generation.py). The draft and the loop
see no difference, and check nothing. A ValueError names the promise that is broken. What such a
part is handed is a copy, or cannot be changed. No check looks at values on a GPU, which would have
to be waited for.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .draft import Exit
from .options import MAX_GROWN, MAX_NODES, short
from .rules import Prediction, Rule
from .stats import Step
from .tree import Proposal, Shape, Tree


def are_nodes(nodes: Any) -> bool:
    """Whether ``nodes`` are a list of plain ints: True and 1.0 would pass for node 1."""
    return type(nodes) in (list, tuple) and all(type(node) is int for node in nodes)


class CheckedExit:
    """An exit that has a number, and predicts a row of logits for each node."""

    def __init__(self, exit_: Exit, vocab_size: int) -> None:
        for name in ("exit_layer", "max_positions", "predict", "keep"):
            if not hasattr(exit_, name):
                raise ValueError(f"an exit has {name}, unlike {short(exit_)}")
        self.exit = exit_
        self.vocab_size = vocab_size
        self.exit_layer = exit_.exit_layer
        self.max_positions = exit_.max_positions
        if type(self.exit_layer) is not int or self.exit_layer < 0:
            raise ValueError(
                f"an exit's number is a whole one from 0, not {short(self.exit_layer)}"
            )
        if not isinstance(self.max_positions, int | float):
            raise ValueError(
                f"an exit's max_positions is a number, not {short(self.max_positions)}"
            )

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
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
        copies = {"logits": step.logits.clone(), "hidden": step.hidden.clone()}
        lists = {"accepted": list(step.accepted), "tokens": list(step.tokens)}
        self.exit.keep(replace(step, **copies, **lists))

    def end(self) -> None:
        if hasattr(self.exit, "end"):
            self.exit.end()


FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16


class CheckedRule:
    """A rule that proposes tokens of the vocabulary, and accepts a path from the root down."""

    def __init__(self, rule: Rule, prunes: bool) -> None:
        for name in ("exact", "propose", "verify"):
            if not hasattr(rule, name):
                raise ValueError(f"a rule has {name}, unlike {short(rule)}")
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
        if not isinstance(q, list | tuple) or len(q) not in (0, len(nodes)):
            raise ValueError(f"a rule gives q for none or all of {len(nodes)} nodes")
        if len(q) > 0 and self.prunes:
            raise ValueError("a rule that draws does not go with a shape that leaves nodes out")
        if not all(isinstance(row, Tensor) and row.shape == (size,) for row in q):
            raise ValueError(f"a rule's q are tensors of {size} probabilities, not {short(q)}")
        return proposal

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        found = self.rule.verify(tree, logits.clone())
        if type(found) is not tuple or len(found) != 2 or not are_nodes(found[0]):
            raise ValueError(
                f"a rule verifies to (accepted nodes, bonus token), not {short(found)}"
            )
        accepted, bonus = found
        parent = 0
        for node in accepted:
            if node not in range(1, len(tree.tokens)) or tree.parents[node] != parent:
                raise ValueError(f"a rule accepts a path from the root down, not {short(accepted)}")
            parent = node
        if type(bonus) is not int or not 0 <= bonus < logits.shape[1]:
            raise ValueError(f"a bonus token is one of {logits.shape[1]}, not {short(bonus)}")
        return list(accepted), bonus


def are_lists(rows: Any, count: int) -> bool:
    """Whether ``rows`` are so many lists."""
    return isinstance(rows, list) and len(rows) == count and all(type(row) is list for row in rows)


class CheckedShape:
    """A shape whose trees are not too large, and which sends the root, and others with parents."""

    def __init__(self, shape: Shape) -> None:
        for name in ("depth", "prunes", "frontier", "width", "sent"):
            if not hasattr(shape, name):
                raise ValueError(f"a shape has {name}, unlike {short(shape)}")
        self.shape = shape
        self.depth = shape.depth
        self.prunes = bool(shape.prunes)
        if type(self.depth) is not int or not 1 <= self.depth <= MAX_NODES:
            raise ValueError(
                f"tree: expected a depth from 1 to {MAX_NODES}, not {short(self.depth)}"
            )

    def frontier(self, tree: Tree, leaves: list[int]) -> list[int]:
        nodes = self.shape.frontier(tree, list(leaves))
        if not are_nodes(nodes) or [leaf for leaf in leaves if leaf in nodes] != list(nodes):
            raise ValueError(f"a frontier is some of {short(leaves)} in order, not {short(nodes)}")
        grown = len(tree.tokens) + sum(self.width(tree, node) for node in nodes)
        if grown > MAX_GROWN:
            raise ValueError(f"tree: expected to grow to {MAX_GROWN} nodes at most, not {grown}")
        return list(nodes)

    def width(self, tree: Tree, node: int) -> int:
        width = self.shape.width(tree, node)
        if type(width) is not int or not 1 <= width <= MAX_NODES:
            raise ValueError(f"tree: expected a width from 1 to {MAX_NODES}, not {short(width)}")
        return width

    def sent(self, tree: Tree) -> list[int]:
        nodes = self.shape.sent(tree)
        kept = set(nodes) if are_nodes(nodes) else set()
        count = len(tree.tokens)
        ascending = kept and list(nodes) == sorted(kept) and nodes[0] == 0 and nodes[-1] < count
        if not ascending or not all(tree.parents[node] in kept for node in nodes[1:]):
            raise ValueError(f"nodes are sent in order, with their parents: not {short(nodes)}")
        if len(nodes) < count and not self.prunes:
            raise ValueError("a shape leaves nodes out, though it says that it does not prune")
        if len(nodes) > MAX_NODES + 1:
            raise ValueError(
                f"tree: expected to send up to {MAX_NODES} nodes, not {len(nodes) - 1}"
            )
        return list(nodes)
