"""The sorted draft: several drafts in one, each level from the cheapest that is confident enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the layers of the draft model fall into
segments, each of which ends at an exit. Exit 0, our addition, has a table in the place of layers
(ngram/table.py). The top of tree.py explains frontier, slot and place.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .cache import move_up
from .mask import positions_and_mask
from .model import Llama
from .rules import Prediction, Rule
from .sampling import warp
from .tree import Shape, Tree, Tried

WINDOW = 256  # positions of context that a segment runs at a time, so that masks stay small


class Exit(Protocol):
    """A place where the draft may predict: ``LayerExit``, or ``ngram.TableExit``."""

    exit_layer: int  # number of layers before it
    threshold: float  # a confidence above it is enough
    max_positions: float  # in the longest text that it can read

    def predict(self, tree: Tree) -> Prediction:
        """What follows each node of the frontier."""

    def keep(self, n: int, slots: list[int]) -> None:
        """Roll back to n positions of context and the accepted ``slots`` after them."""


class DecisionModel(Protocol):
    """Decides whether to draft another level (decision.py)."""

    def stops(self, tree: Tree, parents: list[int], prediction: Prediction) -> bool:
        """Whether drafting ends, after a level was added to ``tree``.

        ``prediction`` is what it came from; row i is about what follows the node parents[i].
        """

    def prepare_for(self, draft: Llama) -> None:
        """Move to the device of ``draft``; ValueError if it was made for another draft."""


class LayerExit:
    """An exit after ``exit_layer`` layers of a draft model, with the segment that leads to it.

    A token that was read only as far as an earlier exit has no keys and values in this segment.
    When a later token needs them, the segment first runs on all that it has not read, from the
    hidden states that the ``previous`` exit kept (catch-up). This rests on an invariant: what an
    exit has read is a prefix of what the previous exit has read, in the same slots. So what is
    missing is always one range. Reading keeps the invariant, since exits are asked in order. So
    does ``keep``: each exit keeps those of the accepted slots that it has read, the first ones,
    since slots rise along a path.
    """

    def __init__(
        self,
        model: Llama,
        previous: "LayerExit | None",
        exit_layer: int,
        threshold: float,
        capacity: int,
    ) -> None:
        """``capacity``: positions of context and slots of nodes that it may hold at once."""
        self.model = model
        self.previous = previous
        self.exit_layer = exit_layer
        self.threshold = threshold
        self.max_positions = model.config.max_position_embeddings
        self.first_layer = 0 if previous is None else previous.exit_layer
        self.cache = model.new_cache(capacity, self.first_layer, exit_layer)
        size = (1, capacity, model.config.hidden_size)
        self.hidden = torch.zeros(size, device=model.device, dtype=model.dtype)  # at this exit

    def predict(self, tree: Tree) -> Prediction:
        n = len(tree.context)
        while n - self.cache.length > WINDOW:
            self.read(tree, end=self.cache.length + WINDOW)
        hidden = self.read(tree, end=n + len(tree.expanded))
        # What was unread ends with the frontier: its nodes are the last of ``expanded``. If the
        # frontier is the context, what was unread ends with the context's last token.
        hidden = hidden[0, -len(tree.frontier) :]  # (R, hidden)
        # At temperature 1, so that thresholds mean the same at any temperature.
        probs = warp(self.model.logits(hidden), temperature=1.0)  # (R, V)
        confidence = probs.max().item()  # one node that is sure is enough for all
        if math.isnan(confidence):
            raise ValueError("the draft's logits are NaN: its weights are damaged, or overflow")
        return Prediction(probs, confidence, hidden=hidden)

    def read(self, tree: Tree, end: int) -> Tensor:
        """Run the segment on what is unread, up to entry ``end`` of its cache: (1, T, hidden).

        The entries are for the context and, after it, for the slots of the expanded nodes.
        """
        start = self.cache.length
        context_end = min(len(tree.context), end)
        tokens, parents = tree.part(tree.expanded[: end - context_end])
        if self.previous is None:
            unread = (tree.context[:context_end] + tokens)[start:end]
            hidden = self.model.embed(torch.tensor([unread], device=self.model.device))
        else:
            hidden = self.previous.hidden[:, start:end]
        positions, mask = positions_and_mask(
            start, context_end, parents, self.model.device, self.model.dtype, tree.shape.ancestors
        )
        hidden = self.model.run_layers(
            hidden, self.first_layer, self.exit_layer, positions, mask, self.cache
        )
        self.hidden[:, start:end] = hidden
        return hidden

    def keep(self, n: int, slots: list[int]) -> None:
        held = [slot for slot in slots if n + slot < self.cache.length]  # those that it has read
        self.cache.keep(n, held)
        move_up(self.hidden, n, held)


class SortedDraft:
    """A draft of sorted exits, from the cheapest on.

    Args:
        exits: in the order of their layers, the fewest first.
        shape: of the trees.
        min_prob: ``Options.stop``; see ``FixedShape`` and ``GrowingShape``.
        decision: a decision model that may end drafting earlier.
        node_count: how many nodes of a growing tree to send, given the ``Tree.probs`` of those that
            its shape allows, the largest first. If it is None, all of these are sent.
    """

    def __init__(
        self,
        exits: list[Exit],
        shape: Shape,
        min_prob: float = 0.0,
        decision: DecisionModel | None = None,
        node_count: Callable[[list[float]], int] | None = None,
    ) -> None:
        self.exits = exits
        self.shape = shape
        self.min_prob = min_prob
        self.decision = decision
        self.node_count = node_count
        self.max_positions = min(each.max_positions for each in exits)

    def new_tree(self, context: list[int], max_levels: int) -> Tree:
        return Tree(context, self.shape, max_levels, self.min_prob)

    def grow(self, tree: Tree, rule: Rule) -> None:
        """Add levels to ``tree`` until its shape or a decision ends it; choose what to send."""
        while tree.frontier:
            exit_layer, prediction = self.predict(tree)
            if prediction.confidence == 0.0:
                break  # nothing is known
            count = self.shape.widths[tree.level_count]
            proposal = rule.propose(prediction, count, tree.next_positions(tree.frontier))
            tokens, probs = as_lists(prediction.tokens(proposal.columns), proposal.probs)
            parents = tree.frontier
            tree.add_level(tokens, probs, exit_layer, prediction.confidence, proposal.q)
            # Asked after the level was added: a token that was drawn must be sent (see rules.py).
            if self.decision is not None and self.decision.stops(tree, parents, prediction):
                break
        nodes = self.shape.nodes_to_send(tree)
        if self.node_count is not None:
            nodes = nodes[: self.node_count([tree.probs[node] for node in nodes])]
        tree.sent = sorted(nodes, key=lambda node: (tree.depths[node], node))

    def predict(self, tree: Tree) -> tuple[int, Prediction]:
        """The first exit that is confident enough, or the last: its layers and its prediction.

        Exits are chosen before tokens are drawn (see rules.py).
        """
        *earlier, last = self.exits
        for each in earlier:
            prediction = self.ask(each, tree)
            if prediction.confidence > each.threshold:
                return each.exit_layer, prediction  # the layers after it are not run
        return last.exit_layer, self.ask(last, tree)

    def ask(self, each: Exit, tree: Tree) -> Prediction:
        prediction = each.predict(tree)
        tree.tried.append(
            Tried(tree.level_count, tree.frontier, each.exit_layer, prediction.confidence)
        )
        return prediction

    def keep(self, tree: Tree, accepted: list[int]) -> None:
        """Roll back to the context and the ``accepted`` places of ``tree.sent``."""
        slots = tree.slots(accepted)
        for each in self.exits:
            each.keep(len(tree.context), slots)


def as_lists(tokens: Tensor, probs: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and probs (R, children) as lists, for which a GPU is waited for once."""
    both = torch.stack((tokens.to(probs.dtype), probs))  # float32 or better: exact up to id 2^24
    token_rows, prob_rows = both.tolist()
    return [[int(token) for token in row] for row in token_rows], prob_rows
