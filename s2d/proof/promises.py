"""``checked(part)``: which promise an exit, a rule or a shape of your own breaks."""

from functools import partial
from inspect import isroutine
from itertools import pairwise
from typing import Any

from torch import Tensor

from ..options import MAX_NODES, expect, short
from ..rules import Prediction, Proposal
from ..stats import Step
from ..tree import Node, Tree


def contents(value: Any) -> Any:
    """What a part could change of a ``value`` that it is handed, as it is now."""
    if isinstance(value, Tensor):
        return value.nan_to_num().tolist()
    if isinstance(value, Node):
        return value, value.token, value.prob, contents(value.q)
    if isinstance(value, Tree | Step):
        value = list(vars(value).values())
    return [contents(each) for each in value] if isinstance(value, list | tuple) else value


class checked:
    """A ``part`` of your own that says which promise it breaks, in one ValueError.

    The draft and the loop check nothing, and hand their own objects to a part. So wrap a part while
    you write it: ``generate(..., rule=checked(Own), exits=[checked(Own)], tree=checked(shape))``.
    It is an exit, a rule or a shape, or a function that makes one. The checks look at values, so a
    GPU is waited for.
    """

    def __init__(self, part: Any, made_for: Any = None) -> None:
        self.part = part
        self.made_for = made_for

    def __call__(self, *given: Any) -> "checked":
        """An exit for (target, draft), a rule for (distribution, draws), or a shape."""
        return checked(self.part(*given), *given[:1])

    @property
    def __class__(self) -> type:
        """What ``isinstance`` sees: the next exit goes on from a checked ``LayerExit``."""
        return type(self.part)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if isroutine(value):  # and no model, which is callable, too
            return partial(self.ask, name)
        if name in ("exit_layer", "max_positions"):
            is_right = isinstance(value, int | float) and value >= 0
            expect(is_right, f"an exit's {name} is a number from 0", value)
        return value

    def ask(self, method: str, *given: Any) -> Any:
        """What a method of the part answers; it may not change what it is ``given``."""
        before = contents(given)
        answer = getattr(self.part, method)(*given)
        if contents(given) != before:
            raise ValueError(f"{method} changes what it is handed")
        if hasattr(checked, f"check_{method}"):
            try:
                getattr(self, f"check_{method}")(answer, *given)
            except (AttributeError, IndexError, RuntimeError, TypeError) as error:
                raise ValueError(f"{method} answers {short(answer)}: {error}") from error
        return answer

    def check_predict(self, said: Prediction, tree: Tree, nodes: list[Node]) -> None:
        V = self.made_for.config.vocab_size if self.made_for else said.logits.shape[-1]
        shape = len(nodes), V
        is_right = said.logits.shape == shape and said.logits.is_floating_point()
        expect(is_right, f"an exit predicts floats of shape {shape}", said.logits.shape)
        is_right = said.confidence >= 0  # a NaN is not
        expect(is_right, "an exit's confidence is a number from 0", said.confidence)

    def check_propose(
        self, found: Proposal, tree: Tree, nodes: list[Node], said: Prediction, width: int
    ) -> None:
        tokens, estimates, q = found
        R, V = said.logits.shape
        is_right = len(tokens) == R and tokens.dim() == 2 and tokens.shape == estimates.shape
        expect(is_right, f"a rule proposes tokens and estimates of shape ({R}, C)", found)
        expect((estimates >= 0).all(), "a rule's estimates are numbers from 0", estimates)
        for row, estimate in zip(tokens, estimates):
            row = row[estimate > 0].tolist()
            is_right = all(0 <= token < V for token in row) and len({*row}) == len(row) <= width
            expect(is_right, f"a rule proposes up to {width} different tokens of {V}", row)
        expect(q is None or q.shape == (R, V), f"a rule's q has the shape ({R}, {V})", q)
        if q is not None and tree.shape.prunes:
            raise ValueError("a rule that draws does not go with a shape that leaves nodes out")

    def check_verify(self, found: tuple[list[Node], int], tree: Tree, logits: Tensor) -> None:
        accepted, bonus = found
        path = pairwise([tree.root, *accepted])
        is_right = all(node in tree.nodes and node.parent is above for above, node in path)
        expect(is_right, "a rule accepts a path from the root down", accepted)
        is_right = type(bonus) is int and 0 <= bonus < logits.shape[1]
        expect(is_right, f"a bonus token is one of {logits.shape[1]}", bonus)

    def check_frontier(self, nodes: list[Node], leaves: list[Node]) -> None:
        is_right = [each for each in leaves if each in nodes] == nodes
        expect(is_right, "a frontier is some of the leaves in order", nodes)
        expect(len(leaves) <= MAX_NODES, f"a level has up to {MAX_NODES} nodes", len(leaves))

    def check_width(self, width: int, node: Node) -> None:
        expect(type(width) is int and width > 0, "a width is a whole number from 1", width)

    def check_sent(self, sent: list[Node], nodes: list[Node]) -> None:
        expect(len(nodes) <= MAX_NODES, f"a tree grows up to {MAX_NODES} nodes", len(nodes))
        is_right = [each for each in nodes if each in sent] == sent and sent[:1] == nodes[:1]
        is_right = is_right and all(node.parent in sent for node in sent[1:])
        expect(is_right, "nodes are sent in order, with their parents", sent)
