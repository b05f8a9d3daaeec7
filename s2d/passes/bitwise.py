"""Passes of one size: the text, and every logit, is the same bit for bit whatever drafts.

In bfloat16 a pass over eight rows rounds otherwise than eight passes over one row. So where two
logits are nearly equal, speculative decoding may write another text than plain decoding, in every
engine. Two things besides a row's own numbers decide how it is rounded: the number of rows of the
pass, by which a kernel is chosen; and where the keys end, as the last, partial vector of keys is
summed in another order. So here,

1. every pass of the target has 16 rows: the root and the chain, then rows that stand for nothing;
2. the keys of a pass are a multiple of 16: those behind the last one are masked;
3. the prompt but its last token is read before the first step, in a pass of its own.

Plain decoding (``method="ar"``) makes its passes in the same form, and is what other methods equal.
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
    """A cache for ``capacity`` entries. After the first pass, a multiple of ROWS is attended to."""

    def __init__(self, model: Llama, capacity: int) -> None:
        config = model.config
        sizes = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        super().__init__(*sizes, device=model.device, dtype=model.dtype)
        layers, heads, head_dim = sizes
        # Zeros, as what is masked is multiplied by 0, and must be finite.
        self.keys = self.keys.new_zeros((layers, 1, heads, capacity, head_dim))
        self.values = torch.zeros_like(self.keys)

    def extend(self, T: int) -> None:
        is_first = self.length == 0
        super().extend(T)
        if not is_first:
            end = whole_rows(self.length)
            self.all_keys = self.keys.narrow(3, 0, end).unbind()
            self.all_values = self.values.narrow(3, 0, end).unbind()


def whole_rows(count: int) -> int:
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
        self.cache = PaddedCache(target, whole_rows(self.limit + ROWS))

    def run_target(self, tree: Tree) -> tuple[Tensor, Tensor]:
        device = self.target.device
        before = self.context[:-1]
        states = []
        if self.cache.length < len(before):  # this is the first step
            positions = torch.arange(len(before), dtype=torch.float32, device=device)
            prompt = torch.tensor([before], device=device)
            states.append(self.read(Inputs(prompt, positions, mask=None)))
        S = len(before)
        tokens = [node.token for node in tree.nodes]
        nothing = [tokens[-1]] * (ROWS - len(tokens))
        mask = torch.full((ROWS, whole_rows(S + ROWS)), -torch.inf, dtype=self.target.dtype)
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
