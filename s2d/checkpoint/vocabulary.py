"""Drafts whose vocabulary is a little shorter or longer than the target's, or another one."""

from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F

from ..model import Llama, LlamaConfig
from .notices import tell
from .tokenizer import Tokenizer

# Tokens that one of two models with the same tokenizer may have more, since vocabularies are padded
# for GPUs: 32,000 or 32,064 for Llama 2, 128,256 or 128,264 for Llama 3. The limit is llama.cpp's.
PADDING = 128
SAMPLE = "In 1998, naïve users wrote:\n\tprint(2 * 34) # 日本, Größe"


def refuse_other_size(draft_config: LlamaConfig, vocab_size: int) -> None:
    """Raise ValueError if a draft cannot have the vocabulary of a target, of ``vocab_size``."""
    if abs(draft_config.vocab_size - vocab_size) > PADDING:
        sizes = f"{draft_config.vocab_size} and {vocab_size} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")


def tell_other_tokenizer(draft: Path, tokenizer: Tokenizer) -> None:
    """Say so if the folder ``draft`` has another tokenizer than the target, by a sample text."""
    try:
        own = Tokenizer(draft)
    except (ValueError, OSError, ModuleNotFoundError):
        return  # nothing is known, as it has none, or one that is not needed
    if own.encode(SAMPLE, with_bos=False) != tokenizer.encode(SAMPLE, with_bos=False):
        tell(
            f"{draft} has another tokenizer than {tokenizer.folder}: its tokens have other "
            "meanings, so that hardly any of what it drafts will be right"
        )


def fit_vocabulary(draft: Llama, vocab_size: int) -> Llama:
    """Give ``draft`` the vocabulary of a target with ``vocab_size`` tokens, and return it.

    A token that only one of them has is never drafted. The target may write it nevertheless; then
    the draft reads its last token in the place of this one. Raises ValueError if the sizes are too
    different.
    """
    own = draft.config.vocab_size
    refuse_other_size(draft.config, vocab_size)
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
