"""The SoFT losses: every exit of a draft learns the next token at once (arXiv 2407.01955, 4)."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 1024  # positions whose logits are in memory at a time


def exit_hidden(model, tokens: torch.Tensor, exits):
    """Yields the hidden states (B, T, hidden) of tokens (B, T) at each of the rising ``exits``."""
    hidden, first = model.embed(tokens), 0
    for exit_layer in exits:
        hidden = model.run_layers(hidden, first, exit_layer)
        yield hidden
        first = exit_layer


def soft_losses(model, tokens, labels, exits, count=None, distillation=None):
    """Next-token cross entropy (E,) in nats at each of ``exits``, from one pass.

    ``labels`` (B, T) is the token that follows each of ``tokens`` (B, T), -100 where nothing is to
    be learnt. The losses of labelled tokens are summed and divided by ``count``, by default their
    number. The mean over the exits, which share the final norm and the LM head, is the loss of
    Sorted LLaMA (arXiv 2309.08968, section 3). ``distillation`` (train/distil.py) adds its term.

    With a real vocabulary nothing takes more memory than logits: they are made for CHUNK positions
    at a time, and once more in the backward pass.
    """
    learnt = labels != -100  # (B, T)
    labels = labels[learnt].long()  # (N,)
    taught = distillation.hidden(tokens)[learnt] if distillation else None  # (N, teacher's hidden)
    losses = []
    for hidden in exit_hidden(model, tokens, exits):
        hidden, loss = hidden[learnt], 0.0  # (N, hidden)
        for start in range(0, max(1, len(labels)), CHUNK):
            part = slice(start, start + CHUNK)
            taught_part = taught[part] if distillation else None
            arguments = (model, hidden[part], labels[part], distillation, taught_part)
            loss = loss + checkpoint(chunk_loss, *arguments, use_reentrant=False)
        losses.append(loss)
    return torch.stack(losses) / max(1, len(labels) if count is None else count)


def chunk_loss(model, hidden, labels, distillation, taught):
    """Summed loss of hidden states (N, hidden) at one exit, by the ``labels`` (N,) that follow."""
    features = model.model.norm(hidden)  # (N, hidden), what the head reads
    logits = F.linear(features, model.lm_head.weight).float()  # (N, V)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if distillation:
        loss = loss + distillation.loss(taught, features, logits)
    return loss
