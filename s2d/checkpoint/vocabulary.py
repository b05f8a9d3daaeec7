"""Drafts whose vocabulary is a little shorter or longer than the target's."""

from dataclasses import replace

import torch.nn.functional as F

from ..model import Llama, LlamaConfig

# Tokens that one of two models with the same tokenizer may have more, since vocabularies are padded
# for GPUs: 32,000 or 32,064 for Llama 2, 128,256 or 128,264 for Llama 3. The limit is llama.cpp's.
PADDING = 128


def same_vocabulary(draft_config: LlamaConfig, vocab_size: int) -> bool:
    """Whether a draft's vocabulary may be that of a target with ``vocab_size`` tokens."""
    return abs(draft_config.vocab_size - vocab_size) <= PADDING


def fit_vocabulary(draft: Llama, vocab_size: int) -> Llama:
    """Give ``draft`` the vocabulary of a target with ``vocab_size`` tokens, and return it.

    A token that only one of them has is never drafted. The target may write it nevertheless; then
    the draft reads its last token in the place of this one. Raises ValueError if the sizes are too
    different.
    """
    own = draft.config.vocab_size
    if not same_vocabulary(draft.config, vocab_size):
        sizes = f"{own} and {vocab_size} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")
    if own != vocab_size:
        missing = max(0, vocab_size - own)
        draft.model.embed_tokens.register_forward_pre_hook(
            lambda module, inputs: (inputs[0].clamp(max=own - 1),)
        )
        draft.lm_head.register_forward_hook(
            lambda module, inputs, logits: F.pad(
                logits[..., :vocab_size], (0, missing), value=float("-inf")
            )
        )
        draft.config = replace(draft.config, vocab_size=vocab_size)
    return draft
