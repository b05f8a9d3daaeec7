"""The loss of SoFT, sorted fine-tuning: every exit of a draft learns the next token at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .model import Llama

CHUNK = 1024  # positions whose logits are in memory at a time


@dataclass(frozen=True)
class Aim:
    """A second aim of the loss: to imitate a ``teacher`` with the same vocabulary.

    By default its distributions: KL(p || q) where it has p, an exit q (arXiv 2310.08461, section
    3). With ``align`` its features instead, as in S2D's ablation, which comes without a formula.
    Chosen here: features are what the LM head reads; their mean squared difference, times
    ``align``, at every exit. So the teacher is as wide as the draft.
    """

    teacher: Llama
    align: float | None = None

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """What the teacher's LM head reads, (B, T, its hidden size), of tokens (B, T)."""
        return self.teacher.model.norm(self.teacher.run_layers(self.teacher.embed(tokens)))

    def loss(self, taught: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        """Summed over N positions, for ``features`` (N, hidden) and ``logits`` (N, V) of an exit.

        ``taught`` (N, its hidden size) is what ``hidden`` gives there.
        """
        if self.align is not None:
            return self.align * (features.float() - taught.float()).square().mean(dim=-1).sum()
        with torch.no_grad():
            log_p = self.teacher.lm_head(taught).float().log_softmax(dim=-1)  # (N, V)
        return (log_p.exp() * (log_p - logits.log_softmax(dim=-1))).sum()


def soft_losses(
    model: Llama,
    tokens: Tensor,
    labels: Tensor,
    exits: Sequence[int],
    count: int | None = None,
    aim: Aim | None = None,
) -> Tensor:
    """The loss at each of E rising ``exits``, (E,) in nats, from one pass.

    The loss at an exit is the cross entropy of lm_head(norm(hidden states there)). The mean over
    the exits is SoFT's loss (S2D, arXiv 2407.01955, section 4, after Sorted LLaMA, arXiv
    2309.08968).

    Args:
        tokens: (B, T).
        labels: (B, T), the token that follows each; -100 if it is not to be learnt.
        count: what the sum over labelled tokens is divided by; by default their number. If a batch
            goes through the model in parts, ``count`` is the number in the whole batch.
        aim: a second aim, which adds its term.

    With a large vocabulary, logits would take most of the memory. So they are made for CHUNK
    positions at a time, and once more in the backward pass.
    """

    def chunk_loss(hidden: Tensor, labels: Tensor, *taught: Tensor) -> Tensor:
        features = model.model.norm(hidden)  # (N, hidden), what the head reads
        logits = model.lm_head(features).float()  # (N, V)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss if aim is None else loss + aim.loss(*taught, features, logits)

    learnt = labels != -100  # (B, T)
    labels = labels[learnt].long()  # (N,)
    taught = [] if aim is None else [aim.hidden(tokens)[learnt].split(CHUNK)]
    hidden = model.embed(tokens)  # (B, T, hidden)
    first = 0
    losses = []
    for exit_layer in exits:
        hidden = model.run_layers(hidden, first, exit_layer)
        first = exit_layer
        # If there is nothing to learn, there is one empty chunk, whose gradients are zero.
        chunks = zip(hidden[learnt].split(CHUNK), labels.split(CHUNK), *taught)
        losses.append(sum(checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks))
    return torch.stack(losses) / (max(1, len(labels)) if count is None else max(1, count))
