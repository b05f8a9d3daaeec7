"""The sorted draft: several drafts in one, each token from the cheapest that is confident enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the draft's layers fall into segments,
each of which ends at an exit. Exit 0, our addition, has no layers: it looks in a table (ngram.py).
"""

import math
from dataclasses import dataclass

import torch

from .cache import move_up
from .model import LlamaConfig
from .ngram import ORDER, NGrams
from .sampling import Prediction, Sampling, choose_children, warp
from .tree import Tree

WINDOW = 256  # positions of context that a segment runs at a time, so that masks stay small


@dataclass(frozen=True)
class DraftConfig(LlamaConfig):
    """A Llama, and how to draft with it unless options say otherwise."""

    exit_layers: tuple[int, ...] = ()  # the layers after which it may predict
    thresholds: tuple[float, ...] = ()  # one per exit: the confidence that is enough there
    draft_length: int = 6  # of a chain
    draft_stop: float = 0.0  # a chain ends where its path is less probable than this
    draft_tree: tuple[int, int, int] = (10, 4, 60)  # top_k, depth, size


class LayerExit:
    """The exit after ``layer`` layers of ``model``, and the segment of layers that leads to it.

    A token that left at an earlier exit has no keys and values in this segment. When a later token
    needs them, the segment first runs all that it has not seen, from the hidden states that the
    exit ``below`` kept (catch-up). Invariant: an exit has seen a prefix of what the exit below has
    seen, in the same slots. So it is after a roll-back too, and what is missing is one pass.
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
        while n - self.cache.length > WINDOW:  # the context first: at once if the cache is empty
            seen = self.cache.length
            self.run(tree, end=min(seen + WINDOW, n - 1) if seen > 0 else n - 1)
        hidden = self.run(tree, end=n + len(tree.expanded))
        hidden = hidden[0, -len(tree.frontier) :]  # (R, hidden)
        # At temperature 1, so that thresholds mean the same at any temperature.
        probs = warp(self.model.logits(hidden), temperature=1.0)  # (R, V)
        confidence = probs.max().item()  # one node that is sure is enough for all
        if math.isnan(confidence):
            raise ValueError("the draft's logits are NaN: its weights are damaged, or overflow")
        return Prediction(probs, confidence, hidden=hidden)

    def run(self, tree, end):
        """Run the segment on what it has not seen up to position ``end``: (1, T, hidden)."""
        n, start = len(tree.context), self.cache.length
        nodes = tree.expanded[: max(0, end - n)]
        if self.below:
            hidden = self.below.hidden[:, start:end]
        else:
            tokens = [*tree.context[start:end], *tree.part(nodes)[0]]
            tokens = torch.tensor([tokens[start - end :]], device=self.model.device)
            hidden = self.model.embed(tokens)
        positions, mask = tree.positions_and_mask(start, end, nodes, self.model)
        hidden = self.model.run_layers(hidden, self.first, self.layer, positions, mask, self.cache)
        self.hidden[:, start:end] = hidden
        return hidden

    def keep(self, n: int, slots: list[int]):
        """Roll back to n positions of context and the accepted ``slots`` behind them."""
        held = [slot for slot in slots if n + slot < self.cache.length]
        self.cache.keep(n, held)
        move_up(self.hidden, n, held)


class TableExit:
    """Exit 0: what followed the last tokens before, in this text and in a datastore."""

    layer, max_positions = 0, math.inf

    def __init__(self, datastore, threshold, min_columns, device):
        self.ngrams, self.threshold = NGrams(datastore), threshold
        self.min_columns, self.device = min_columns, device
        self.seen = 0  # tokens of the context that are in the table

    def predict(self, tree: Tree) -> Prediction:
        """As LayerExit's, of the tokens that the table knows after any node of the frontier."""
        self.ngrams.text.grow(tree.context[self.seen :])
        self.seen = len(tree.context)
        before = tree.context[-ORDER:]
        tails = [[*before, *tree.path(node)] for node in tree.frontier]
        rows = [self.ngrams.distribution(tail[-ORDER:]) for tail in tails]
        ids = list(dict.fromkeys(token for row in rows for token in row))
        # A node may have more children than are known: others fill the end, with probability 0.
        others = [token for token in range(self.min_columns) if token not in ids]
        ids += others[: max(0, self.min_columns - len(ids))]
        probs = [[row.get(token, 0.0) for token in ids] for row in rows]
        return Prediction(
            torch.tensor(probs, dtype=torch.float64, device=self.device),  # (R, K)
            confidence=max(map(max, probs)),
            ids=torch.tensor(ids, device=self.device),  # (K,)
        )

    def keep(self, n, slots):
        """The table has seen accepted tokens alone."""


class SortedDraft:
    """A draft of sorted ``exits``, the cheapest first, whose trees have one ``shape``.

    min_prob: the least probable path that is followed, see ``KConfig`` and ``Dynamic``
    stop: a function of a tree and the prediction its last level came from, True where drafting
        ends (extras/decision.py)
    nodes_to_send: see ``Tree.send``
    """

    def __init__(self, exits, shape, min_prob=0.0, stop=None, nodes_to_send=None):
        self.exits, self.shape, self.min_prob = exits, shape, min_prob
        self.stop, self.nodes_to_send = stop, nodes_to_send
        self.max_positions = min(exit.max_positions for exit in exits)

    def grow(self, tree: Tree, sampling: Sampling):
        """Add levels to ``tree`` until its shape or ``stop`` ends it; choose what is sent."""
        while tree.frontier:
            exit, prediction = self.predict(tree)
            if prediction.confidence == 0.0:
                break  # nothing is known
            positions = [len(tree.context) + tree.depth(node) + 1 for node in tree.frontier]
            count = self.shape.children(tree.level)
            tokens, probs, q = choose_children(prediction, count, positions, sampling)
            if q is not None:
                tree.q.append(q)
            tree.add_level(tokens.tolist(), probs.tolist(), exit.layer, prediction.confidence)
            # Only now: a token that was drawn is sent (the lemma in verify.py).
            if self.stop is not None and self.stop(tree, prediction):
                break
        tree.send(self.nodes_to_send)

    def predict(self, tree):
        """The first exit that is confident enough, or the last, and its prediction."""
        for exit in self.exits:
            prediction = exit.predict(tree)
            # This alone decides: no token that is drawn has a say in its own exit.
            if prediction.confidence > exit.threshold:
                break  # the layers behind it are not run
        return exit, prediction

    def keep(self, tree: Tree, path: list[int]):
        """Roll back to the context and the accepted ``path``, places in ``tree.sent``."""
        slot = {node: i for i, node in enumerate(tree.expanded)}
        accepted = [tree.sent[i] for i in path]
        slots = [slot[node] for node in accepted if node in slot]
        for exit in self.exits:
            exit.keep(len(tree.context), slots)
