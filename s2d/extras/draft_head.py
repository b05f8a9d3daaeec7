"""A draft's LM head for few tokens: with a large vocabulary it costs as much as many layers.

Knows nothing about decoding (Zhao et al. 2025, arXiv 2502.14856).
"""

import torch
from torch import nn


class DraftHead(nn.Module):
    """A copy, not learnt, of the rows of ``lm_head`` for ``tokens`` (K,), the only ones drafted."""

    def __init__(self, lm_head, tokens):
        super().__init__()
        self.register_buffer("tokens", tokens.to(lm_head.weight.device), persistent=False)
        weight = lm_head.weight.detach()[self.tokens]  # (K, hidden)
        self.rows = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        del self.rows.weight  # no parameter
        self.rows.register_buffer("weight", weight, persistent=False)

    def forward(self, hidden):
        return self.rows(hidden)

    def over_all(self, logits, vocab_size):
        """Logits (R, K) -> (R, V): what the draft never drafts has -inf."""
        everything = logits.new_full((len(logits), vocab_size), -torch.inf)
        return everything.index_copy_(1, self.tokens, logits)


def draft_head(model):
    """The DraftHead of a draft; None where it drafts all tokens."""
    return getattr(model, "draft_head", None)
