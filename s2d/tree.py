"""Token trees: many continuations of one text, which the target checks in a single pass.

A tree is drafted level by level. A chain is a tree with one node in each level. The text before the
tree is called the context.

    depth  0     1     2     3
           a ─┬─ b ─┬─ d ─── g
              │     └─ e
              └─ c ─── f ─── h

Node a is the root: it is the last token of the context. The others are drafted tokens. Parents are
proposed before their children. The draft reads only nodes that are to get children: here a, b, c, d
and f. They are *expanded*. Before a tree is sent to the target, its least probable nodes may be
left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

TARGET = -1  # in the place of an exit's number: the target chose this token


@dataclass(eq=False)
class Node:
    """A token of a tree. Two nodes are never equal, even if they have the same token."""

    token: int
    parent: "Node | None" = field(default=None, repr=False)  # None for the root
    prob: float = 1.0  # the product of the draft's estimates for the tokens on the path
    exit_layer: int = TARGET  # the exit that drafted it, by its number of layers
    q: Tensor | None = None  # (V,): what it was drawn from, if it was drawn
    path: tuple["Node", ...] = field(init=False, repr=False)  # from the root down to this node
    depth: int = field(init=False)  # the number of tokens on the path after the root

    def __post_init__(self) -> None:
        above = () if self.parent is None else self.parent.path
        self.path = (*above, self)
        self.depth = len(above)

    def child(
        self, token: int, estimate: float, exit_layer: int, q: Tensor | None = None
    ) -> "Node":
        """A node below this one; ``estimate`` is how probable it is after its parent."""
        # By rounding, an estimate may be above 1. No child is more probable than its parent.
        return Node(token, self, self.prob * min(estimate, 1.0), exit_layer, q)


class Shape(Protocol):
    """How a tree grows: ``FixedShape``, ``GrowingShape``, or an object of your own."""

    depth: int  # the number of levels below the root
    prunes: bool  # whether nodes may be left out: then no child is drawn (rules.Rejection)

    def frontier(self, leaves: list[Node]) -> list[Node]:
        """Which of the ``leaves``, nodes of the last level, get children: in their order."""

    def width(self, node: Node) -> int:
        """How many children a ``node`` of the frontier gets."""

    def sent(self, nodes: list[Node]) -> list[Node]:
        """Which ``nodes`` are sent, in their order: the root, and others with their parents."""


class Tree:
    """The tree of one step, which grows in a ``shape`` after a ``context`` (ids)."""

    def __init__(self, context: Sequence[int], shape: Shape) -> None:
        self.context = context
        self.shape = shape
        self.nodes = [Node(context[-1])]  # the root first; after drafting, those that are sent
        self.expanded: list[Node] = []  # in the order of the draft's caches
        self.depth = 0  # the number of levels that were drafted

    @property
    def root(self) -> Node:
        return self.nodes[0]

    def leaves(self, least: float, eos: Sequence[int]) -> list[Node]:
        """The nodes of the last level that may get children.

        Their paths have a probability of ``least`` or more, and no drafted EOS at the end.
        """
        level = [node for node in self.nodes if node.depth == self.depth and node.prob >= least]
        return [node for node in level if node.depth == 0 or node.token not in eos]

    def add_level(self, parents: list[Node], children: list[Node]) -> None:
        """Add a level, the ``children`` of all its ``parents``."""
        self.expanded += parents
        self.nodes += children
        self.depth += 1

    def children(self, parent: Node) -> list[Node]:
        """The nodes below ``parent``, in the order in which they were proposed."""
        return [node for node in self.nodes if node.parent is parent]

    def text(self, node: Node) -> list[int]:
        """The ids of the context and of the path to ``node``."""
        return [*self.context, *(each.token for each in node.path[1:])]

    def next_positions(self, nodes: Sequence[Node]) -> list[int]:
        """For each of ``nodes``, the position in the text of the token that follows it."""
        return [len(self.context) + node.depth for node in nodes]


@dataclass(frozen=True)
class FixedShape:
    """The root gets ``widths[0]`` children, each of them gets ``widths[1]``, and so on.

    (1, 1, 1) is a chain of three tokens. (4, 1, 1) is a fork of four chains: such a list is the
    k-config of multi-candidate speculative decoding (arXiv 2401.06706, section 3).
    """

    widths: tuple[int, ...]
    prunes = False

    @property
    def depth(self) -> int:
        return len(self.widths)

    def frontier(self, leaves: list[Node]) -> list[Node]:
        return leaves

    def width(self, node: Node) -> int:
        return self.widths[node.depth]

    def sent(self, nodes: list[Node]) -> list[Node]:
        return nodes


@dataclass(frozen=True)
class GrowingShape:
    """A tree that grows where the draft is confident: S2D's draft tree (arXiv 2407.01955).

    As in the authors' code, after EAGLE-2 (Li et al. 2024, arXiv 2406.16858): the ``top_k`` most
    probable nodes of each level get their ``top_k`` best children. In the end the ``size`` most
    probable of all nodes are sent.
    """

    top_k: int
    depth: int
    size: int
    prunes = True

    def frontier(self, leaves: list[Node]) -> list[Node]:
        return most_probable(leaves, self.top_k)

    def width(self, node: Node) -> int:
        return self.top_k

    def sent(self, nodes: list[Node]) -> list[Node]:
        return [nodes[0], *most_probable(nodes[1:], self.size)]


def most_probable(nodes: list[Node], count: int) -> list[Node]:
    """The ``count`` most probable ``nodes``, in their order.

    A child is never more probable than its parent. Of equally probable nodes the first ones are
    taken, so a parent is taken before its child.
    """
    best = set(sorted(nodes, key=lambda node: node.prob, reverse=True)[:count])
    return [node for node in nodes if node in best]
