"""What exits, rules and shapes have to keep to: a ValueError names the promise that is broken.

Each function is called where such an object answers. None of them looks at values on a GPU, which
would have to be waited for.
"""

from typing import Any

from torch import Tensor

from .rules import Prediction
from .tree import GrowingShape, Proposal, Shape, Tree

MAX_NODES = 1024  # of a tree: its mask takes this number squared
MAX_GROWN = 8192  # nodes of a growing tree before it is cut: its ancestor matrix takes their square


def check_shape(shape: Shape) -> None:
    """A shape has a depth, a width for each level, and a capacity: whole numbers within bounds."""
    sizes = [shape.depth]
    if isinstance(shape, GrowingShape):
        sizes += [shape.top_k, shape.size]
    if all(is_count(size) for size in sizes):
        sizes += [shape.capacity, *(shape.width(depth) for depth in range(shape.depth))]
    if not all(is_count(size) for size in sizes):
        raise ValueError(f"tree: expected 1 to {MAX_NODES} nodes, not {short(shape)}")
    if isinstance(shape, GrowingShape) and shape.top_k**2 * shape.depth > MAX_GROWN:
        raise ValueError(f"tree: expected to grow to {MAX_GROWN} nodes at most, unlike {shape}")


def is_count(number: Any) -> bool:
    return type(number) is int and 1 <= number <= MAX_NODES


def are_nodes(nodes: Any) -> bool:
    """Whether ``nodes`` are a list of plain ints: True and 1.0 would pass for node 1."""
    return type(nodes) is list and all(type(node) is int for node in nodes)


def check_frontier(nodes: list[int], leaves: list[int], room: int) -> None:
    """A shape gives children to some of the leaves, in ascending order, and to ``room`` at most."""
    if not are_nodes(nodes) or [leaf for leaf in leaves if leaf in nodes] != nodes:
        raise ValueError(f"a frontier is some of {short(leaves)} in order, not {short(nodes)}")
    if len(nodes) > room:
        raise ValueError("a shape has more nodes than its capacity")


def check_prediction(prediction: Prediction, rows: int, vocab_size: int) -> None:
    """An exit predicts a row of logits for each node, and its confidence is a number."""
    if not isinstance(prediction, Prediction):
        raise ValueError(f"an exit returns a Prediction, not {short(prediction)}")
    logits, confidence, _ = prediction
    is_right = isinstance(logits, Tensor) and logits.is_floating_point()
    if not is_right or logits.shape != (rows, vocab_size):
        found = f"{tuple(logits.shape)} in {logits.dtype}" if is_right else short(logits)
        raise ValueError(f"an exit predicts floats of shape {(rows, vocab_size)}, not {found}")
    if not isinstance(confidence, (int, float)) or not confidence >= 0:
        words = "damaged weights, or overflow" if confidence != confidence else "a number from 0"
        raise ValueError(f"an exit's confidence is {short(confidence)}: {words}")


def check_proposal(proposal: Proposal, rows: int, width: int, vocab_size: int) -> None:
    """A rule proposes, for each node, at most ``width`` different tokens, each with an estimate."""
    tokens, probs, _ = proposal if isinstance(proposal, Proposal) else Proposal([], [])
    if len(tokens) != rows or [len(row) for row in tokens] != [len(row) for row in probs]:
        raise ValueError(f"a rule proposes tokens and estimates for {rows} nodes, as many of each")
    for row in tokens:
        are_tokens = all(type(token) is int and 0 <= token < vocab_size for token in row)
        if not are_tokens or len(row) > width or len(set(row)) < len(row):
            expected = f"up to {width} different tokens of {vocab_size}"
            raise ValueError(f"a rule proposes {expected}, not {short(row)}")


def check_sent(nodes: list[int], tree: Tree, capacity: int) -> None:
    """A shape sends nodes in ascending order: the root, and others with their parents.

    Children that were drawn are all sent (``rules.Rejection``), and so is the target's own choice.
    """
    count = len(tree.tokens)
    kept = set(nodes) if are_nodes(nodes) else set()
    ascending = kept and nodes == sorted(kept) and nodes[0] == 0 and nodes[-1] < count
    if not ascending or not all(tree.parents[node] in kept for node in nodes[1:]):
        raise ValueError(f"nodes are sent in their order, with their parents: not {short(nodes)}")
    if len(nodes) > capacity + 1:
        raise ValueError("a shape has more nodes than its capacity")
    of_target = count > 1 and tree.exit_layers[1] is None
    if len(nodes) < count and (tree.q or (of_target and 1 not in kept)):
        raise ValueError("a shape leaves out nodes that a rule has drawn")


def check_verified(found: tuple[list[int], int], tree: Tree, vocab_size: int) -> None:
    """A rule accepts a path from the root down, and the bonus is a token of the vocabulary."""
    if type(found) is not tuple or len(found) != 2 or not are_nodes(found[0]):
        raise ValueError(f"a rule verifies to (accepted nodes, bonus token), not {short(found)}")
    accepted, bonus = found
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
