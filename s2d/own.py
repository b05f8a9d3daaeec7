"""What exits, rules and shapes have to keep to: a ValueError names the promise that is broken.

Each function is called where such an object answers. None of them looks at values on a GPU, which
would have to be waited for.
"""

from typing import Any

from torch import Tensor

from .tree import Shape, Tree

MAX_NODES = 1024  # of a tree: its mask takes this number squared


def check_shape(shape: Shape) -> None:
    """A shape has a depth, a width for each level, and a capacity: whole numbers within bounds."""
    for number in (shape.depth, shape.capacity):
        if type(number) is not int or not 1 <= number <= MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} nodes, which {short(shape)} has not")
    for depth in range(shape.depth):
        width = shape.width(depth)
        if type(width) is not int or width < 1:
            raise ValueError(f"a node has 1 or more children, not {short(width)}: {short(shape)}")


def check_frontier(nodes: list[int], leaves: list[int]) -> None:
    """A shape gives children to some of the leaves, in ascending order."""
    if [leaf for leaf in leaves if leaf in nodes] != nodes:
        raise ValueError(f"a frontier is some of {short(leaves)} in order, not {short(nodes)}")


def check_prediction(logits: Tensor, confidence: float, rows: int, vocab_size: int) -> None:
    """An exit predicts a row of logits for each node, and its confidence is a number."""
    shape = tuple(logits.shape)
    if shape != (rows, vocab_size) or not logits.is_floating_point():
        expected = f"floats of shape {(rows, vocab_size)}"
        raise ValueError(f"an exit predicts {expected}, not {shape} in {logits.dtype}")
    if not isinstance(confidence, (int, float)) or not confidence >= 0:
        words = "damaged weights, or overflow" if confidence != confidence else "a number from 0"
        raise ValueError(f"an exit's confidence is {short(confidence)}: {words}")


def check_proposal(tokens: list[list[int]], rows: int, width: int, vocab_size: int) -> None:
    """A rule proposes, for each node, at most ``width`` different tokens of the vocabulary."""
    if len(tokens) != rows:
        raise ValueError(f"a rule proposes children for {rows} nodes, not {len(tokens)}")
    for row in tokens:
        are_tokens = all(type(token) is int and 0 <= token < vocab_size for token in row)
        if not are_tokens or len(row) > width or len(set(row)) < len(row):
            expected = f"up to {width} different tokens of {vocab_size}"
            raise ValueError(f"a rule proposes {expected}, not {short(row)}")


def check_sent(nodes: list[int], tree: Tree) -> None:
    """A shape sends nodes in ascending order: the root, and others with their parents.

    Children that were drawn are all sent (``rules.Rejection``).
    """
    count = len(tree.tokens)
    if nodes == list(range(count)):
        return
    kept = set(nodes)
    ascending = nodes == sorted(kept) and nodes[:1] == [0] and nodes[-1] < count
    if not ascending or not all(tree.parents[node] in kept for node in nodes[1:]):
        raise ValueError(f"nodes are sent in their order, with their parents: not {short(nodes)}")
    if tree.q:
        raise ValueError("a shape leaves out nodes that a rule has drawn")


def check_verified(accepted: list[int], bonus: int, tree: Tree, vocab_size: int) -> None:
    """A rule accepts a path from the root down, and the bonus is a token of the vocabulary."""
    parent = 0
    for node in accepted:
        if node not in range(1, len(tree.tokens)) or tree.parents[node] != parent:
            raise ValueError(f"a rule accepts a path from the root down, not {short(accepted)}")
        parent = node
    if type(bonus) is not int or not 0 <= bonus < vocab_size:
        raise ValueError(f"a bonus token is one of {vocab_size}, not {short(bonus)}")


def short(value: Any) -> str:
    """A value in a message: in one line, and not long."""
    return f"{' '.join(repr(value).split()):.60}"
