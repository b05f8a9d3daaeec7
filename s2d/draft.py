"""The sorted draft: several drafts in one, each level from the cheapest that is confident enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the layers of the draft model fall into
segments, and each segment ends at an exit, where the draft may predict.
"""

import math
from typing import Protocol

import torch

from .mask import unread
from .model import Llama, move_up, with_room
from .options import Options
from .rules import Prediction, Rule
from .sampling import NOT_FINITE, Distribution
from .stats import Step
from .tree import Node, Tree


class Exit(Protocol):
    """A place where the draft may predict, for one answer: ``LayerExit``, or one of your own."""

    exit_layer: int  # the number of layers before it: the exit's name in statistics
    max_positions: float  # the length of the longest text that it can read

    def predict(self, tree: Tree, nodes: list[Node]) -> Prediction:
        """What follows each of R ``nodes`` of the last level of ``tree``."""

    def keep(self, step: Step) -> None:
        """A step was made: its accepted path is a part of the text, other nodes are not."""


class LayerExit:
    """An exit after ``exit_layer`` layers of a draft model, with the segment that leads to it.

    Exits are asked in order, and a later exit often is not asked at all. Then its segment has not
    read the newest tokens. When the segment is needed again, it first catches up: it reads all that
    it has missed, from the hidden states that the ``previous`` exit has kept.

    The entries of a cache are the context first, then the expanded nodes after the root. What an
    exit has read is always a prefix of what the previous exit has read. An example is the picture
    in tree.py, after a context of 6 tokens, of which the root a is the last:

        entry   0 1 2 3 4 5   6       7       8       9
        holds   the context   node b  node c  node d  node f

    Exit 2 has read all ten entries, and exit 3 the first 8. Now the target accepts the nodes b and
    d. Exit 2 keeps their entries, 6 and 8. Exit 3 keeps entry 6, and reads d later, as context.
    """

    def __init__(self, model: Llama, previous: "LayerExit | None", exit_layer: int) -> None:
        if previous is not None and previous.model is not model:
            raise ValueError("exits: expected layers of another model after all exits of the draft")
        self.model = model
        self.previous = previous
        self.exit_layer = exit_layer
        self.max_positions = model.config.max_position_embeddings
        self.first_layer = 0 if previous is None else previous.exit_layer
        self.cache = model.new_cache(self.first_layer, exit_layer)
        size = (1, 0, model.config.hidden_size)
        self.hidden = torch.empty(size, device=model.device, dtype=model.dtype)  # by entry

    def predict(self, tree: Tree, nodes: list[Node]) -> Prediction:
        """Read what is missing of the context and of the expanded nodes, and ``nodes`` last."""
        self.catch_up(tree, nodes)
        end = self.cache.length
        hidden = self.hidden[0, end - len(nodes) : end]  # (R, hidden)
        logits = self.model.logits(hidden)  # (R, V)
        # At temperature 1, so that thresholds mean the same at any temperature. If the exit is sure
        # about one node, that is enough for all. So it is in the authors' code.
        return Prediction(logits, Distribution(temperature=1.0)(logits).max(), hidden)

    def catch_up(self, tree: Tree, nodes: list[Node]) -> None:
        """Run the segment on all that it has not read, ``nodes`` last; the previous one first."""
        expanded = [*tree.expanded, *nodes]  # in the order of their entries: the root is the first
        read = self.cache.length
        if read == len(tree.context) - 1 + len(expanded):
            return  # a later exit asks for what this one has just read
        if self.previous is not None:
            self.previous.catch_up(tree, nodes)
        for tokens, positions, mask in unread(tree.context, expanded, read, like=self.hidden):
            start = self.cache.length
            end = start + tokens.shape[1]
            if self.previous is None:
                hidden = self.model.embed(tokens)
            else:
                hidden = self.previous.hidden[:, start:end]
            hidden = self.model.run_layers(
                hidden, self.first_layer, self.exit_layer, positions, mask, self.cache
            )
            self.hidden = with_room(self.hidden, end, start)
            self.hidden[:, start:end] = hidden

    def keep(self, step: Step) -> None:
        """Keep what was read of the accepted path. The rest is read later, as context."""
        n = len(step.tree.context)
        # In the example: n is 6, and places are 1 and 3, of b and d. The root's entry is n - 1.
        places = [place for place, node in enumerate(step.tree.expanded) if node in step.accepted]
        entries = [n - 1 + place for place in places if n - 1 + place < self.cache.length]
        self.cache.keep(n, entries)
        move_up(self.hidden, n, entries)


class SortedDraft:
    """A draft of sorted ``exits``, the cheapest first; ``eos`` are the target's ids."""

    def __init__(self, exits: list[Exit], options: Options, eos: tuple[int, ...]) -> None:
        self.exits = exits
        self.thresholds = options.thresholds
        self.stop = options.stop
        self.eos = eos

    def grow(self, tree: Tree, depth: int, rule: Rule) -> None:
        """Add levels to ``tree`` down to ``depth``, and leave out what its shape does not send."""
        while tree.depth < depth:
            nodes = tree.shape.frontier(tree.leaves(self.stop, self.eos))
            if not nodes:
                break
            children, confidence = self.choose_exit(tree, nodes, rule)
            if confidence == 0:
                break  # not even the last exit that was asked knows anything
            tree.add_level(nodes, children)
        tree.nodes = tree.shape.sent(tree.nodes)

    def choose_exit(self, tree: Tree, nodes: list[Node], rule: Rule) -> tuple[list[Node], float]:
        """Children of ``nodes`` by the first exit that is confident enough, or by the last one.

        Only the confidence says which exit. Tokens are drawn at each exit that is asked, but nobody
        looks at them before the exit is chosen: that would change their law (``rules.Rejection``).
        """
        *earlier, last = self.exits
        for exit_, threshold in zip(earlier, self.thresholds):
            children, confidence = self.ask(exit_, tree, nodes, rule)
            if confidence > threshold:
                return children, confidence  # the layers after this exit are not run
        return self.ask(last, tree, nodes, rule)

    def ask(
        self, exit_: Exit, tree: Tree, nodes: list[Node], rule: Rule
    ) -> tuple[list[Node], float]:
        """Children of R ``nodes`` by an exit, and how confident the exit is."""
        if len(tree.context) + tree.depth > exit_.max_positions:
            return [], 0.0  # the exit cannot read so long a text
        prediction = exit_.predict(tree, nodes)
        widths = [tree.shape.width(node) for node in nodes]
        tokens, estimates, q = rule.propose(tree, nodes, prediction, max(widths))  # (R, C)
        # One tensor, so that a GPU is waited for once. Numbers up to 2^24 are exact in float32.
        estimates = estimates.to(torch.promote_types(estimates.dtype, torch.float32))
        confidence = torch.zeros_like(estimates) + prediction.confidence
        numbers = torch.stack((tokens.to(estimates.dtype), estimates, confidence)).tolist()
        children = []
        for row, (node, width) in enumerate(zip(nodes, widths)):
            for token, estimate in list(zip(numbers[0][row], numbers[1][row]))[:width]:
                if math.isnan(estimate):
                    raise ValueError(f"exit {exit_.exit_layer} of the draft: {NOT_FINITE}")
                if estimate > 0:
                    drawn_from = None if q is None else q[row]
                    children.append(node.child(int(token), estimate, exit_.exit_layer, drawn_from))
        return children, numbers[2][0][0]
