"""The loss of SoFT, sorted fine-tuning: every exit of a draft learns the next token at once."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .model import Llama

CHUNK = 1024  # positions whose logits are in memory at a time


def soft_losses(model: Llama, tokens: Tensor, labels: Tensor, exits: Sequence[int]) -> Tensor:
    """The loss at each of E exits, (E,) in nats, summed over the labelled tokens.

    The mean over tokens and exits is SoFT's loss (S2D, arXiv 2407.01955, section 4, after Sorted
    LLaMA, arXiv 2309.08968). For tokens (B, T), ``labels`` (B, T) are the tokens that follow, or
    -100 where nothing is to be learnt.
    """
    learnt = labels != -100  # (B, T)
    loss = partial(cross_entropy, model)
    states = exit_states(model, tokens, exits)
    return torch.stack([sum_of_chunks(loss, each[learnt], labels[learnt]) for each in states])


def exit_states(model: Llama, tokens: Tensor, exits: Sequence[int]) -> Iterator[Tensor]:
    """Yield the hidden states (B, T, hidden) at each of the rising ``exits``, all from one pass."""
    hidden = model.embed(tokens)
    for first, end in zip((0, *exits), exits):
        hidden = model.run_layers(hidden, first, end)
        yield hidden


def cross_entropy(model: Llama, hidden: Tensor, labels: Tensor) -> Tensor:
    """Of hidden states (N, hidden) at an exit and the ``labels`` (N,) that follow, summed."""
    return F.cross_entropy(model.logits(hidden).float(), labels.long(), reduction="sum")


def sum_of_chunks(loss: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The sum of ``loss`` over chunks of ``rows``, each (N, ...).

    All logits at once would take most of the memory. So they are made for CHUNK positions at a
    time, and once more in the backward pass. If N is 0, one empty chunk gives gradients of zero.
    """
    chunks = zip(*(each.split(CHUNK) for each in rows))
    return sum(checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks)
