"""What a model has not read of a text and its tree: tokens, positions, and what they attend to."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .devices import to_device
from .tree import Node

MAX_PROMPT = 256  # unread tokens in the tree's pass: for more, its mask would be large


class Inputs(NamedTuple):
    """What a model reads in a pass."""

    tokens: Tensor  # (1, T)
    positions: Tensor  # (T,) in float32
    mask: Tensor | None  # (T, S+T), 0 where a row attends to a column, -inf elsewhere; None: causal


def unread(context: Sequence[int], nodes: list[Node], read: int, like: Tensor) -> list[Inputs]:
    """The inputs of the passes over what is not read; the last one is over the tree.

    A long prompt has a pass of its own before. What a model has missed later is read in passes of
    MAX_PROMPT tokens.
    """
    found = []
    while len(context) - read > MAX_PROMPT:
        end = len(context) - 1 if read == 0 else read + MAX_PROMPT
        found.append(inputs(context[:end], [Node(context[end - 1])], read, like))
        read = end
    return [*found, inputs(context, nodes, read, like)]


def inputs(context: Sequence[int], nodes: list[Node], read: int, like: Tensor) -> Inputs:
    """The inputs of the pass over what is not read.

    Args:
        context: ids. The last one is the root, which is nodes[0].
        nodes: of a tree, parents first. In the model's cache they follow the context.
        read: how many entries the cache has: a part of the context, or all of it and some nodes.
        like: a tensor with the model's device and dtype.

    An example: the context is s t u v a. Of the tree in tree.py, the nodes a, b, c and d are given.
    The model has read s t u v.

                s t u v   a b c d
          a     x x x x   x . . .      position 4
          b     x x x x   x x . .               5
          c     x x x x   x . x .               5
          d     x x x x   x x . x               6

    If a and b have been read as well, their rows are missing.
    """
    root = len(context) - 1  # the entry of nodes[0]
    new_nodes = nodes[max(0, read - root) :]
    tokens = [*context[read:root], *(node.token for node in new_nodes)]
    positions = [*range(read, root), *(root + node.depth for node in new_nodes)]
    mask = None
    if nodes[-1].depth < len(nodes) - 1:  # no chain: some nodes are not on the last one's path
        T = len(tokens)
        first = T - len(new_nodes)  # the row of new_nodes[0]
        column = {node: number for number, node in enumerate(nodes, root)}
        seen = [(i, column[each]) for i, node in enumerate(new_nodes, first) for each in node.path]
        rows, columns = torch.tensor(seen).T
        blocked = torch.ones((T, read + T), dtype=torch.bool).triu(read + 1)  # what comes later
        blocked[first:, root:] = True  # of the nodes, a node sees only those on its path
        blocked[rows, columns] = False
        mask = torch.zeros(blocked.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(to_device(blocked, like.device), -torch.inf)
    return Inputs(
        tokens=to_device([tokens], like.device),
        positions=to_device(positions, like.device, torch.float32),
        mask=mask,
    )
