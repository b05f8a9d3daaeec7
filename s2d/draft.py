"""The sorted draft: several drafts in one, each token from the cheapest that is confident enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the draft's layers fall into segments,
each of which ends at an exit. Exit 0, our addition, has no layers but a table: see ngram.py.
"""

import math

import torch

from .cache import move_up
from .sampling import Prediction, Sampling, choose_children, warp
from .tree import Tree, positions_and_mask

WINDOW = 256  # positions of context that a segment runs at a time, so that masks stay small


class LayerExit:
    """The exit after ``layer`` layers of ``model``, and the segment of layers that leads to it.

    A token that left at an earlier exit has no keys and values in this segment. When a later token
    needs them, the segment first runs all that it has not seen, from the hidden states that the
    exit ``below`` kept (catch-up). Invariant: an exit has seen a prefix of what the exit below has
    seen, in the same slots. A roll-back keeps that, so what is missing is always one range.
    """

    def __init__(self, model, below, layer, threshold, capacity):
        self.model, self.below, self.layer, self.threshold = model, below, layer, threshold
        self.max_positions = model.config.max_position_embeddings
        self.first = below.layer if below else 0
        self.cache = model.new_cache(capacity, self.first, layer)
        size = (1, capacity, model.config.hidden_size)
        self.hidden = torch.zeros(size, device=model.device, dtype=model.dtype)

    def predict(self, tree: Tree) -> Prediction:
        """A prediction for each node of the frontier of ``tree``."""
        n = len(tree.context)
        while n - self.cache.length > WINDOW:
            self.run(tree, end=self.cache.length + WINDOW)
        hidden = self.run(tree, end=n + len(tree.expanded))
        hidden = hidden[0, -len(tree.frontier) :]  # (R, hidden), whose rows come last
        # At temperature 1, so that thresholds mean the same at any temperature.
        probs = warp(self.model.logits(hidden), temperature=1.0)  # (R, V)
        confidence = probs.max().item()  # one node that is sure is enough for all
        if math.isnan(confidence):
            raise ValueError("the draft's logits are NaN: its weights are damaged, or overflow")
        return Prediction(probs, confidence, hidden=hidden)

    def run(self, tree, end):
        """Run the segment on what it has not seen up to position ``end``: (1, T, hidden)."""
        model, start = self.model, self.cache.length
        n = min(len(tree.context), end)  # inside the context there are no nodes
        tokens, parents = tree.part(tree.expanded[: end - n])
        if self.below:
            hidden = self.below.hidden[:, start:end]
        else:
            tokens = tree.context[start:n] + tokens[max(0, start - n) :]
            hidden = model.embed(torch.tensor([tokens], device=model.device))
        positions, mask = positions_and_mask(start, n, parents, model, tree.shape.ancestors)
        hidden = model.run_layers(hidden, self.first, self.layer, positions, mask, self.cache)
        self.hidden[:, start:end] = hidden
        return hidden

    def keep(self, n: int, slots: list[int]):
        """Roll back to n positions of context and the accepted ``slots`` behind them."""
        held = [slot for slot in slots if n + slot < self.cache.length]
        self.cache.keep(n, held)
        move_up(self.hidden, n, held)


class SortedDraft:
    """A draft of sorted ``exits``, the cheapest first, whose trees have one ``shape``.

    stop: ``min_prob`` of ``KConfig`` and ``Dynamic``, or a function of a tree and its last
        prediction that is True where drafting ends (extras/decision.py)
    nodes_to_send: how many of a growing tree, see ``Options``
    """

    def __init__(self, exits, shape, stop=0.0, nodes_to_send=None):
        self.exits, self.shape, self.stop, self.nodes_to_send = exits, shape, stop, nodes_to_send
        self.min_prob = 0.0 if callable(stop) else stop
        self.max_positions = min(exit.max_positions for exit in exits)

    def grow(self, tree: Tree, sampling: Sampling):
        """Add levels to ``tree`` until its shape or ``stop`` ends it; choose what is sent."""
        while tree.frontier:
            exit, prediction = self.predict(tree)
            if prediction.confidence == 0.0:
                break  # nothing is known
            positions = [len(tree.context) + tree.depths[node] + 1 for node in tree.frontier]
            count = self.shape.widths[tree.level]
            tokens, probs, q = choose_children(prediction, count, positions, sampling)
            if q is not None:
                tree.q.append(q)
            tree.add_level(tokens.tolist(), probs.tolist(), exit.layer, prediction.confidence)
            # Only now: a token that was drawn is sent (see verify.py).
            if callable(self.stop) and self.stop(tree, prediction):
                break
        tree.send(self.nodes_to_send)

    def predict(self, tree):
        """The first exit that is confident enough, or the last, and its prediction."""
        for exit in self.exits:
            prediction = exit.predict(tree)
            # Chosen before tokens are drawn (see verify.py).
            if prediction.confidence > exit.threshold:
                break  # the layers behind it are not run
        return exit, prediction

    def keep(self, tree: Tree, path: list[int]):
        """Roll back to the context and the accepted ``path``, places in ``tree.sent``."""
        slot = {node: i for i, node in enumerate(tree.expanded)}
        accepted = [tree.sent[i] for i in path]
        slots = [slot[node] for node in accepted if node in slot]
        for exit in self.exits:
            if exit.layer > 0:  # the table of exit 0 has seen accepted tokens alone
                exit.keep(len(tree.context), slots)
