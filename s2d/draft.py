"""The sorted draft: several drafts in one, each level from the cheapest that is confident enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the layers of the draft model fall into
segments, and each segment ends at an exit, where the draft may predict.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from .cache import enlarge, move_up
from .devices import to_device
from .mask import MAX_UNREAD, ROOT_ALONE, positions_and_mask
from .model import Llama
from .options import Options
from .rules import Prediction, Rule
from .sampling import warp
from .stats import Step
from .tree import Shape, Tree


class Exit(Protocol):
    """A place where the draft may predict, for one answer: ``LayerExit``, or one of your own.

    If an exit has a method ``end()``, it is called when the answer has ended.
    """

    exit_layer: int  # the number of layers before it: the exit's name in statistics
    max_positions: float  # the length of the longest text that it can read

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
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
    in tree.py, after a context of 6 tokens:

        entry   0 1 2 3 4 5   6       7       8       9
        holds   the context   node 1  node 2  node 3  node 5

    Exit 2 has read all ten entries, and exit 3 the first 8. Now the target accepts the nodes 1 and
    3. Exit 2 keeps their entries, 6 and 8. Exit 3 keeps entry 6, and reads node 3 later, as
    context.
    """

    def __init__(self, model: Llama, previous: "LayerExit | None", exit_layer: int) -> None:
        self.model = model
        self.previous = previous
        self.exit_layer = exit_layer
        self.max_positions = model.config.max_position_embeddings
        self.first_layer = 0 if previous is None else previous.exit_layer
        self.cache = model.new_cache(self.first_layer, exit_layer)
        size = (1, 0, model.config.hidden_size)
        self.hidden = torch.empty(size, device=model.device, dtype=model.dtype)  # by entry

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
        """Read what is missing of the context and of the expanded nodes, and ``nodes`` last."""
        self.read(tree, nodes)
        end = self.cache.length
        hidden = self.hidden[0, end - len(nodes) : end]  # (R, hidden)
        logits = self.model.logits(hidden)  # (R, V)
        # At temperature 1, so that thresholds mean the same at any temperature. If the exit is sure
        # about one node, that is enough for all. So it is in the authors' code.
        confidence = warp(logits, temperature=1.0).max().item()
        return Prediction(logits, confidence, hidden)

    def read(self, tree: Tree, nodes: Sequence[int]) -> None:
        """Run the segment on all that it has not read, up to ``nodes``; the previous one before."""
        expanded = [*tree.expanded, *nodes]  # in the order of their entries: the root is the first
        tokens = [*tree.context, *(tree.tokens[node] for node in expanded[1:])]
        if self.cache.length == len(tokens):
            return  # a later exit asks for what this one has just read
        if self.previous is not None:
            self.previous.read(tree, nodes)
        n = len(tree.context)
        # An exit that lags needs a mask, with a row for each token: it reads a long part in pieces.
        for end in range(self.cache.length + MAX_UNREAD, n, MAX_UNREAD):
            self.run(tokens[:end], end, ROOT_ALONE)
        self.run(tokens, n, tree.ancestors[np.ix_(expanded, expanded)])

    def run(self, tokens: Sequence[int], context_length: int, ancestors: np.ndarray) -> None:
        """Run the segment on those of the ``tokens`` that it has not read.

        The ``tokens`` are those of the context, then those of M expanded nodes. ``ancestors`` (M+1,
        M+1) is about the root, which is the context's last token, and these nodes.
        """
        start = self.cache.length
        end = len(tokens)
        if self.previous is None:
            hidden = self.model.embed(to_device([tokens[start:]], self.model.device))
        else:
            hidden = self.previous.hidden[:, start:end]
        positions, mask = positions_and_mask(
            start, context_length, ancestors, self.model.device, self.model.dtype
        )
        hidden = self.model.run_layers(
            hidden, self.first_layer, self.exit_layer, positions, mask, self.cache
        )
        if end > self.hidden.shape[1]:
            self.hidden = enlarge(self.hidden, end, start)
        self.hidden[:, start:end] = hidden

    def keep(self, step: Step) -> None:
        """Keep what was read of the accepted path. The rest is read later, as context."""
        n = len(step.tree.context)
        # The root's entry is n - 1, and the other expanded nodes follow it.
        places = [place for place, node in enumerate(step.tree.expanded) if node in step.accepted]
        entries = [n - 1 + place for place in places if n - 1 + place < self.cache.length]
        self.cache.keep(n, entries)
        move_up(self.hidden, n, entries)


class SortedDraft:
    """A draft of sorted ``exits``, the cheapest first; ``eos_token_ids`` are the target's."""

    def __init__(
        self, exits: list[Exit], shape: Shape, options: Options, eos_token_ids: Sequence[int]
    ) -> None:
        self.exits = exits
        self.thresholds = options.thresholds
        self.shape = shape
        self.stop = options.stop
        self.eos_token_ids = eos_token_ids
        self.max_positions = min((each.max_positions for each in exits), default=math.inf)

    def grow(self, tree: Tree, depth: int, rule: Rule) -> Tree:
        """Add levels to ``tree`` down to ``depth``; returns what the shape sends of it."""
        while tree.depth < depth:
            leaves = tree.leaves(self.stop, self.eos_token_ids)
            nodes = self.shape.frontier(tree, leaves)
            if not nodes:
                break
            exit_, prediction = self.choose_exit(tree, nodes)
            if prediction.confidence == 0:
                break  # exit 0 has found nothing
            widths = [self.shape.width(tree, node) for node in nodes]
            proposal = rule.propose(tree, nodes, prediction, widths)
            tree = tree.add_level(nodes, proposal, exit_.exit_layer)
        return tree.prune(self.shape.sent(tree)) if self.shape.prunes else tree

    def choose_exit(self, tree: Tree, nodes: Sequence[int]) -> tuple[Exit, Prediction]:
        """The first exit that is confident enough, or the last one.

        An exit is chosen before its tokens are drawn (see ``rules.Rejection``). All exits that are
        asked are asked about the same ``nodes``.
        """
        *earlier, last = self.exits
        for exit_, threshold in zip(earlier, self.thresholds):
            prediction = exit_.predict(tree, nodes)
            if prediction.confidence > threshold:
                return exit_, prediction  # the layers after this exit are not run
        return last, last.predict(tree, nodes)
