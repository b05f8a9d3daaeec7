"""Passes of one size: the text, and every logit, is the same bit for bit whatever drafts.

In bfloat16 a pass over eight rows rounds otherwise than eight passes over one row. So where two
logits are nearly equal, speculative decoding may write another text than plain decoding, in every
engine. Two things besides a row's own numbers decide how it is rounded: the number of rows of the
pass, by which a kernel is chosen; and where the keys end, as the last, partial vector of keys is
summed in another order. So here,

1. every pass of the target has 16 rows: the root and the chain, then rows that stand for nothing;
2. every pass attends to one number of keys, a multiple of 16 that is enough for the whole answer:
   those that are not written yet are zeros, and masked;
3. the prompt but its last token is read before the first step, in a pass of its own.

Plain decoding (``method="ar"``) in the same form, with the same ``max_new_tokens``, is what all
methods equal. It costs attention to keys that are not there yet, and rows that stand for nothing.
A tree has other sums: a node's ancestors do not lie side by side. So only chains are drafted.

Engines reach this by kernels that do not depend on the batch (Thinking Machines, "Defeating
Nondeterminism in LLM Inference", 2025; LayerCast, arXiv 2506.09501).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..decoder import Decoder
from ..draft import SortedDraft
from ..mask import Inputs
from ..model import KVCache, Llama
from ..options import Options, is_chain
from ..rules import Rule
from ..tree import Tree

ROWS = 16


class PaddedCache(KVCache):
    """A cache of ``capacity`` entries. When the prompt is read, all of them are attended to."""

    def __init__(self, model: Llama, capacity: int) -> None:
        layers, _, heads, _, head_dim = model.new_cache().keys.shape
        super().__init__(layers, heads, head_dim, device=model.device, dtype=model.dtype)
        # Zeros, as what is masked is multiplied by 0, and must be finite.
        self.keys = self.keys.new_zeros((layers, 1, heads, capacity, head_dim))
        self.values = torch.zeros_like(self.keys)
        self.prompt_is_read = False

    def extend(self, T: int) -> None:
        super().extend(T)
        if self.prompt_is_read:
            self.all_keys = self.keys.unbind()
            self.all_values = self.values.unbind()


def padded(count: int) -> int:
    """The smallest multiple of ROWS from ``count``."""
    return -(-count // ROWS) * ROWS


def check_chain(options: Options) -> None:
    """ValueError for trees, and for chains that are too long for a pass."""
    if not is_chain(options.shape) or options.shape.depth >= ROWS:
        raise ValueError(f"bitwise: expected a chain of up to {ROWS - 1} tokens")


class BitwiseDecoder(Decoder):
    """A Decoder whose passes have one size: ``generate(..., decoder=BitwiseDecoder)``."""

    def __init__(
        self,
        target: Llama,
        drafter: SortedDraft,
        rule: Rule,
        context: Sequence[int],
        options: Options,
    ) -> None:
        check_chain(options)
        super().__init__(target, drafter, rule, context, options)
        self.capacity = padded(self.limit + ROWS)
        self.cache = PaddedCache(target, self.capacity)

    def run_target(self, tree: Tree) -> tuple[Tensor, Tensor]:
        device = self.target.device
        before = self.context[:-1]
        S = len(before)
        states = []
        if 0 < S and not self.cache.prompt_is_read:
            prompt = torch.tensor([before], device=device)
            positions = torch.arange(S, dtype=torch.float32, device=device)
            states.append(self.read(Inputs(prompt, positions, mask=None)))
        self.cache.prompt_is_read = True
        tokens = [node.token for node in tree.nodes]
        nothing = [tokens[-1]] * (ROWS - len(tokens))
        mask = torch.full((ROWS, self.capacity), -torch.inf, dtype=self.target.dtype)
        inputs = Inputs(
            tokens=torch.tensor([tokens + nothing], device=device),
            positions=torch.arange(S, S + ROWS, dtype=torch.float32, device=device),
            mask=mask.triu(S + 1).to(device),
        )
        hidden = self.read(inputs)  # (ROWS, hidden)
        logits = self.target.logits(hidden)
        self.cache.length = S + len(tokens)
        hidden = torch.cat((*states, hidden[: len(tokens)]))
        return hidden, logits[: len(tokens)]
