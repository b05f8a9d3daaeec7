"""Passes of one size: the text, and every logit, is the same bit for bit whatever drafts.

In bfloat16 a pass over eight rows rounds otherwise than eight passes over one row. So where two
logits are nearly equal, speculative decoding may write another text than plain decoding, in every
engine. Two things besides a row's own numbers decide how it is rounded: the number of rows of the
pass, by which a kernel is chosen; and where the keys end, as the last, partial vector of keys is
summed in another order. So here,

1. every pass over drafted tokens has 16 rows: the root, the chain, and rows that stand for nothing;
2. every pass attends to one number of keys, a multiple of 16 that is enough for the whole answer:
   those that are not written yet are zeros, and masked;
3. the prompt but its last token is read in a pass of its own, in the first step.

All methods equal plain decoding (``method="ar"``) in the same way, with the same
``max_new_tokens``. The price is attention to keys that are not there yet, and rows that stand for
nothing.
A tree has other sums: a node's ancestors do not lie side by side. So only chains are drafted.

Engines reach this by kernels that do not depend on the batch (Thinking Machines, "Defeating
Nondeterminism in LLM Inference", 2025; LayerCast, arXiv 2506.09501).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..decoder import Decoder
from ..mask import inputs
from ..model import KVCache
from ..options import Options, is_chain, make_shape
from ..tree import TARGET, Node, Tree

ROWS = 16
NO_CHAIN = f"bitwise: expected a chain of up to {ROWS - 1} tokens"


class PaddedCache(KVCache):
    """A cache that goes on from that of the prompt. All of its ``capacity`` is attended to."""

    def __init__(self, prompt: KVCache, capacity: int) -> None:
        *sizes, _, head_dim = prompt.memory.shape
        # Zeros, as what is masked is multiplied by 0, and must be finite.
        super().__init__(prompt.memory.new_zeros((*sizes, capacity, head_dim)))
        self.length = prompt.length
        self.memory[..., : self.length, :] = prompt.memory[..., : self.length, :]

    def extend(self, T: int) -> None:
        super().extend(T)
        self.all_keys, self.all_values = (each.unbind() for each in self.memory)


def padded(count: int) -> int:
    """The smallest multiple of ROWS from ``count``."""
    return -(-count // ROWS) * ROWS


def check_chain(options: Options) -> None:
    """ValueError for trees, and for chains that are too long for a pass."""
    shape = make_shape(options.tree)
    if not is_chain(shape) or shape.depth >= ROWS:
        raise ValueError(NO_CHAIN)


def by_row(distribution: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Logits (R, V) -> probabilities (R, V), row by row: several may be rounded otherwise."""
    return lambda logits: torch.cat([distribution(row) for row in logits.split(1)])


class BitwiseDecoder(Decoder):
    """A Decoder whose passes have one size: ``generate(..., decoder=BitwiseDecoder)``."""

    is_bitwise = True

    def __init__(self, **parts: Any) -> None:
        """``parts`` as of a Decoder; ValueError for what ``check_chain`` refuses."""
        super().__init__(**parts)
        check_chain(self.options)
        self.capacity = padded(self.limit + ROWS)
        if hasattr(self.rule, "distribution"):
            self.rule.distribution = by_row(self.rule.distribution)

    def run_target(self, tree: Tree) -> tuple[Tensor, Tensor]:
        like = self.target.model.norm.weight
        before = self.context[:-1]
        states = []
        if not isinstance(self.cache, PaddedCache):  # this is the first step
            if before:
                states.append(self.read(inputs(before, [Node(before[-1])], 0, like)))
            self.cache = PaddedCache(self.cache, self.capacity)
        nodes = list(tree.nodes)
        if nodes[-1].depth != len(nodes) - 1 or len(nodes) > ROWS:  # by parts of your own
            raise ValueError(NO_CHAIN)
        while len(nodes) < ROWS:  # these stand for nothing
            nodes.append(nodes[-1].child(nodes[-1].token, 1.0, TARGET))
        # The causal mask, but over all of the cache.
        mask = like.new_full((ROWS, self.capacity), -torch.inf).triu(len(self.context))
        hidden = self.read(inputs(self.context, nodes, len(before), like)._replace(mask=mask))
        logits = self.target.logits(hidden)  # (ROWS, V)
        count = len(tree.nodes)
        self.cache.length = len(before) + count
        return torch.cat((*states, hidden[:count])), logits[:count]
