"""The sorted draft: several drafts in one, each level from the cheapest that is confident enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the layers of the draft model fall into
segments, and each segment ends at an exit, where the draft may predict.
"""

import math

import numpy as np
import torch

from .cache import KVCache, move_up
from .devices import to_device
from .mask import MAX_UNREAD, ROOT_ALONE, positions_and_mask
from .model import Llama
from .options import Plan
from .own import check_frontier, check_prediction, check_proposal, check_sent
from .rules import Exit, Prediction, Rule
from .sampling import warp
from .tree import Tree


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
        if exit_layer not in range(1, model.config.num_hidden_layers + 1):
            raise ValueError(f"the draft has no layer {exit_layer}")
        self.model = model
        self.previous = previous
        self.exit_layer = exit_layer
        self.max_positions = model.config.max_position_embeddings
        self.first_layer = 0 if previous is None else previous.exit_layer
        self.cache: KVCache | None = None  # ``start`` makes it

    def start(self, capacity: int) -> None:
        """Make the cache; ValueError if this exit has drafted another answer."""
        if self.previous is not None and self.previous.cache is None:
            raise ValueError(f"exit {self.exit_layer} does not come right after its previous exit")
        if self.cache is not None:
            raise ValueError(f"exit {self.exit_layer} is for one answer: make another LayerExit")
        self.cache = self.model.new_cache(capacity, self.first_layer, self.exit_layer)
        size = (1, capacity, self.model.config.hidden_size)
        self.hidden = torch.empty(size, device=self.model.device, dtype=self.model.dtype)

    def predict(self, tree: Tree, nodes: list[int]) -> Prediction:
        context = tree.context
        while len(context) - self.cache.length > MAX_UNREAD:  # a long prompt is read in parts
            part = context[: self.cache.length + MAX_UNREAD]
            self.read(part, len(part), ROOT_ALONE)
        expanded = [*tree.expanded, *nodes]  # ``nodes`` are [0] at first
        tokens = context + [tree.tokens[node] for node in expanded[1:]]
        self.read(tokens, len(context), tree.ancestors[expanded][:, expanded])
        end = self.cache.length  # the nodes were read last
        hidden = self.hidden[0, end - len(nodes) : end]  # (R, hidden)
        logits = self.model.logits(hidden)  # (R, V)
        # At temperature 1, so that thresholds mean the same at any temperature. If the exit is sure
        # about one node, that is enough for all. So it is in the authors' code.
        confidence = warp(logits, temperature=1.0).max().item()
        return Prediction(logits, confidence, hidden)

    def read(self, tokens: list[int], context_length: int, ancestors: np.ndarray) -> None:
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
        self.hidden[:, start:end] = self.model.run_layers(
            hidden, self.first_layer, self.exit_layer, positions, mask, self.cache
        )

    def keep(self, tree: Tree, accepted: list[int]) -> None:
        """Keep what was read of the ``accepted`` path. The rest is read later, as context."""
        n = len(tree.context)
        entries = [n - 1 + i for i, node in enumerate(tree.expanded) if node in accepted]
        entries = [entry for entry in entries if entry < self.cache.length]
        self.cache.keep(n, entries)
        move_up(self.hidden, n, entries)


class SortedDraft:
    """A draft of sorted exits, the cheapest first; ``vocab_size`` is the target's."""

    def __init__(self, vocab_size: int, exits: list[Exit], plan: Plan) -> None:
        self.vocab_size = vocab_size
        self.exits = exits
        self.plan = plan
        self.capacity = plan.shape.capacity
        # Without exits, the target is alone.
        self.max_positions = min((each.max_positions for each in exits), default=math.inf)
        # How probable it is that a child is accepted: what the rule says, unless it is replaced.
        self.estimate = lambda prediction, proposal: proposal.probs

    def grow(self, tree: Tree, depth: int, rule: Rule) -> Tree:
        """Add levels to ``tree`` down to ``depth``, and leave out what the shape does not send."""
        while tree.depth < depth:
            leaves = tree.leaves(self.plan.stop)
            nodes = self.plan.shape.frontier(list(leaves), list(tree.probs))
            check_frontier(nodes, leaves, self.capacity + 1 - len(tree.expanded))
            if not nodes:
                break
            chosen = self.choose_exit(tree, nodes)
            if chosen is None:
                break
            exit_, prediction = chosen
            width = self.plan.shape.width(tree.depth)
            proposal = rule.propose(tree, nodes, prediction.logits, width)
            check_proposal(proposal, len(nodes), width, self.vocab_size)
            proposal = proposal._replace(probs=self.estimate(prediction, proposal))
            tree.add_level(nodes, proposal, exit_.exit_layer)
        sent = self.plan.shape.sent(tree.probs)
        check_sent(sent, tree, self.capacity)
        tree.prune(sent)
        return tree

    def choose_exit(self, tree: Tree, nodes: list[int]) -> tuple[Exit, Prediction] | None:
        """The first exit that is confident enough, or the last one that knows anything.

        An exit is chosen before its tokens are drawn (see ``rules.Rejection``). Returns None if no
        exit knows anything.
        """
        chosen = None
        for exit_, threshold in zip(self.exits, self.plan.thresholds):
            prediction = exit_.predict(tree, nodes)
            if prediction is None:
                continue
            check_prediction(prediction, len(nodes), self.vocab_size)
            chosen = exit_, prediction
            if prediction.confidence > threshold:
                break  # the layers after this exit are not run
        return chosen
