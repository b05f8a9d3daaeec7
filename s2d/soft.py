"""The loss of SoFT, sorted fine-tuning: every exit of a draft learns the next token at once.

S2D (Kavehzadeh et al. 2024, arXiv 2407.01955, section 4), after Sorted LLaMA (arXiv 2309.08968,
section 3): L = mean over the exits of the cross entropy of lm_head(norm(hidden states there)).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .model import Llama

CHUNK = 1024  # positions whose logits are in memory at a time


class Aim(Protocol):
    """A second aim of the loss, such as to imitate a teacher (train/distil.py)."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """The teacher's hidden states for tokens (B, T): (B, T, its hidden size)."""

    def loss(self, taught: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        """A term of the loss at one exit, summed over N positions.

        ``taught`` are the teacher's hidden states at these positions, ``features`` (N, hidden) what
        the draft's head reads there.
        """


def exit_hidden(model: Llama, tokens: Tensor, exits: Sequence[int]) -> Iterator[Tensor]:
    """Yield the hidden states (B, T, hidden) of tokens (B, T) at each of the rising ``exits``."""
    hidden = model.embed(tokens)
    first = 0
    for exit_layer in exits:
        hidden = model.run_layers(hidden, first, exit_layer)
        yield hidden
        first = exit_layer


def soft_losses(
    model: Llama,
    tokens: Tensor,
    labels: Tensor,
    exits: Sequence[int],
    count: int | None = None,
    aim: Aim | None = None,
) -> Tensor:
    """The loss at each of E ``exits``, (E,) in nats, from one pass. Their mean is SoFT's loss.

    Args:
        tokens: (B, T).
        labels: (B, T), the token that follows each; -100 if it is not to be learnt.
        count: what the sum over labelled tokens is divided by; by default their number. If a batch
            goes through the model in parts, it is the number in the whole batch.
        aim: a second aim, which adds its term.

    With a large vocabulary logits would take most of the memory. So they are made for CHUNK
    positions at a time, and once more in the backward pass.
    """
    learnt = labels != -100  # (B, T)
    labels = labels[learnt].long()  # (N,)
    if count is None:
        count = len(labels)
    taught = None if aim is None else aim.hidden(tokens)[learnt]  # (N, the teacher's hidden size)
    losses = []
    for hidden in exit_hidden(model, tokens, exits):
        hidden = hidden[learnt]  # (N, hidden)
        loss = hidden.new_zeros(())
        # If there is nothing to learn, one empty part is run: gradients then exist, and are zero.
        for start in range(0, max(1, len(labels)), CHUNK):
            part = slice(start, start + CHUNK)
            part_taught = None if taught is None else taught[part]
            inputs = (model, hidden[part], labels[part], part_taught, aim)
            loss = loss + checkpoint(chunk_loss, *inputs, use_reentrant=False)
        losses.append(loss)
    return torch.stack(losses) / max(1, count)


def chunk_loss(
    model: Llama, hidden: Tensor, labels: Tensor, taught: Tensor | None, aim: Aim | None
) -> Tensor:
    """The loss of hidden states (N, hidden) at an exit, summed; ``labels`` (N,) follow them."""
    features = model.model.norm(hidden)  # (N, hidden), what the head reads
    logits = model.lm_head(features).float()  # (N, V)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if aim is not None:
        loss = loss + aim.loss(taught, features, logits)
    return loss
