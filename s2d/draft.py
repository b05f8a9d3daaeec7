"""The sorted draft: several drafts in one, each level from the cheapest that is confident enough.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 3): the layers of the draft model fall into
segments, each of which ends at an exit. That a model predicts after some of its layers, and checks
itself with the others, is known from LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) and
Kangaroo (Liu et al. 2024, arXiv 2404.18911). The top of tree.py explains frontier and slot.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .cache import enlarge, move_up, next_size
from .devices import to_device
from .mask import MAX_UNREAD, positions_and_mask
from .model import Llama
from .notices import tell
from .rules import Prediction, Proposal, Rule
from .sampling import warp
from .tree import Shape, Tree


class Exit(Protocol):
    """A place where the draft may predict: ``LayerExit``, exit 0 (ngram/), or one of your own.

    An object that keeps something between calls serves one generation.
    """

    exit_layer: int  # the number of layers before it, by which statistics name it
    max_positions: float  # in the longest text that it can read

    def predict(self, tree: Tree) -> Prediction:
        """What follows each node of the frontier of ``tree``."""

    def keep(self, n: int, slots: list[int]) -> None:
        """Roll back to n positions of context and the accepted ``slots`` after them."""


class DecisionModel(Protocol):
    """Judges how likely drafted tokens are to be accepted (decision.py)."""

    threshold: float  # a path below it is not continued, unless ``Options.stop`` says otherwise

    def judge(
        self, used: Exit, tree: Tree, prediction: Prediction, proposal: Proposal
    ) -> list[list[float]]:
        """Estimates in the place of ``proposal.probs``, for what follows the frontier of ``tree``.

        ``used`` is the exit that predicted.
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
        capacity: int,
        vocab_size: int,
    ) -> None:
        """``capacity``: positions of context and slots of nodes that it may hold at once.

        ``vocab_size`` is the target's; that of ``model`` may be another, see ``options.PADDING``.
        """
        self.model = model
        self.vocab_size = vocab_size
        self.previous = previous
        self.exit_layer = exit_layer
        self.max_positions = model.config.max_position_embeddings
        self.first_layer = 0 if previous is None else previous.exit_layer
        self.capacity = capacity
        self.cache = model.new_cache(capacity, self.first_layer, exit_layer)
        size = (1, 0, model.config.hidden_size)  # grows as the cache does
        self.hidden = torch.zeros(size, device=model.device, dtype=model.dtype)  # at this exit

    def predict(self, tree: Tree) -> Prediction:
        n = len(tree.context)
        while n - self.cache.length > MAX_UNREAD:
            self.read(tree, end=self.cache.length + MAX_UNREAD)
        self.read(tree, end=n + len(tree.slot_tokens))
        # At temperature 1, so that thresholds mean the same at any temperature.
        logits = self.model.logits(self.frontier_hidden(tree))
        probs = warp(logits[:, : self.vocab_size], temperature=1.0)  # (R, V)
        # One node that is sure is enough for all, as in the authors' code.
        return Prediction(probs, confidence=probs.max().item())

    def frontier_hidden(self, tree: Tree) -> Tensor:
        """The hidden states (R, hidden) of the frontier, which was read last.

        Its nodes have the last slots. If the frontier is the context, it is the context's last
        token, after which no slot was read.
        """
        end = self.cache.length
        return self.hidden[0, end - len(tree.frontier) : end]

    def read(self, tree: Tree, end: int) -> None:
        """Run the segment on what is unread, up to entry ``end`` of its cache.

        The entries are for the context and, after it, for the slots of ``tree``.
        """
        start = self.cache.length
        context_end = min(len(tree.context), end)
        parents = tree.slot_parents[: end - context_end]
        if self.previous is None:
            tokens = tree.context[:context_end] + tree.slot_tokens[: end - context_end]
            unread = to_device([tokens[start:]], self.model.device)  # (1, T)
            # A token that only the target has is read as the draft's last one.
            hidden = self.model.embed(unread.clamp(max=self.model.config.vocab_size - 1))
        else:
            hidden = self.previous.hidden[:, start:end]
        positions, mask = positions_and_mask(
            start, context_end, parents, self.model.device, self.model.dtype, tree.shape.ancestors
        )
        hidden = self.model.run_layers(
            hidden, self.first_layer, self.exit_layer, positions, mask, self.cache
        )
        if end > self.hidden.shape[1]:
            self.hidden = enlarge(self.hidden, next_size(end, self.capacity))
        self.hidden[:, start:end] = hidden

    def keep(self, n: int, slots: list[int]) -> None:
        """As the protocol says. What stays is the beginning of the new context.

        Accepted nodes that have no slot are read later as context, and so is the bonus token.
        """
        # Those that it has read: none, if it lags behind the context.
        held = [slot for slot in slots if n + slot < self.cache.length]
        self.cache.keep(n, held)
        move_up(self.hidden, n, held)


class SortedDraft:
    """A draft of sorted exits, from the cheapest on.

    Args:
        exits: in the order of their layers, the fewest first.
        thresholds: one per exit, a confidence above it is enough; that of the last is not asked.
        shape: of the trees.
        stop: a node whose path has an estimated probability below it gets no children.
        decision: a decision model, whose estimates take the place of the rule's.
    """

    def __init__(
        self,
        exits: list[Exit],
        thresholds: Sequence[float],
        shape: Shape,
        stop: float = 0.0,
        decision: DecisionModel | None = None,
    ) -> None:
        self.exits = exits
        self.thresholds = thresholds
        self.shape = shape
        self.stop = stop
        self.decision = decision
        self.max_positions = min(exit_.max_positions for exit_ in exits)
        self.is_silent = False  # it drafts no more

    def new_tree(self, context: list[int], max_levels: int) -> Tree:
        return Tree(context, self.shape, max_levels, self.stop)

    def grow(self, tree: Tree, rule: Rule) -> None:
        """Add levels to ``tree`` until its shape ends it or nothing is known, and prune it."""
        while tree.frontier and not self.is_silent:
            used, prediction = self.predict(tree)
            if prediction.confidence == 0.0:
                break  # nothing is known
            if math.isnan(prediction.confidence):
                tell("the draft drafts no more: its logits are NaN, by damaged weights or overflow")
                self.is_silent = True
                break
            width = tree.shape.width(tree.level_count)
            proposal = rule.propose(prediction, width, tree.next_positions(tree.frontier))
            probs = proposal.probs
            if self.decision is not None:
                probs = self.decision.judge(used, tree, prediction, proposal)
            # A token with a low estimate stays in the tree, as one that was drawn must be sent (see
            # ``rules.Rejection``); but nothing is drafted after it.
            tree.add_level(proposal.tokens, probs, used.exit_layer, proposal.q)
        tree.prune()

    def predict(self, tree: Tree) -> tuple[Exit, Prediction]:
        """The first exit that is confident enough, or the last, and its prediction.

        Exits are chosen before tokens are drawn (see ``rules.Rejection``).
        """
        *earlier, last = self.exits
        for exit_, threshold in zip(earlier, self.thresholds):  # the last one's is left over
            prediction = exit_.predict(tree)
            if prediction.confidence > threshold:
                return exit_, prediction  # the layers after it are not run
        return last, last.predict(tree)

    def keep(self, tree: Tree, accepted: list[int]) -> None:
        """Roll back to the context and the ``accepted`` nodes of ``tree``."""
        slots = [tree.slots[node] for node in accepted if node in tree.slots]
        for exit_ in self.exits:
            exit_.keep(len(tree.context), slots)
