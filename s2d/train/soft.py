"""The SoFT loss: every exit of a draft learns the next token at once. Knows nothing about decoding."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK = 1024  # positions whose logits are in memory at a time


@dataclass(frozen=True)
class Distillation:
    """A teacher whose distributions p the exits q learn besides the data, as DistillSpec does (arXiv 2310.08461, section 3).

    ``kind`` is "forward" for KL(p || q), "reverse" for KL(q || p) or "tv" for total variation; ``weight`` is its share,
    where the cross entropy's is 1.
    """

    teacher: nn.Module
    kind: str
    weight: float


def exit_hidden(model, tokens, exits, recompute=False):
    """Tokens (B, T) -> hidden states (B, T, hidden) at each of the increasing ``exits`` in turn, in one forward pass.

    With ``recompute`` a layer keeps its input only and runs again in the backward pass (activation checkpointing).
    """
    hidden, start = model.embed(tokens), 0
    for exit_layer in exits:
        if recompute:
            for layer in range(start, exit_layer):
                hidden = checkpoint(model.run_layers, hidden, layer, layer + 1, use_reentrant=False)
        else:
            hidden = model.run_layers(hidden, start, exit_layer)
        yield hidden
        start = exit_layer


def soft_losses(model, tokens, labels, exits, count=None, distillation=None, recompute=False):
    """Next-token cross entropy at every exit, from one forward pass through all layers.

    ``tokens`` (B, T); ``labels`` (B, T) holds the token that follows each position, by its place in the draft's vocabulary
    if the model has one (nested.among), -100 where nothing is to be learnt; ``exits`` are increasing layer numbers. Returns (E,) losses in nats, summed over labelled tokens and divided
    by ``count``, by default their number (0 where there is none); their mean is the loss of Sorted LLaMA (Kavehzadeh et al. 2023, arXiv
    2309.08968, section 3), with one final norm and one LM head for all exits. ``distillation`` adds its term to each.

    Logits, which for a real vocabulary outweigh everything else, are made for CHUNK positions at a time and once more
    in the backward pass; no two exits' are in memory together.
    """
    learnt = labels != -100  # (B, T)
    wanted = labels[learnt].long()  # (N,)
    if distillation:
        with torch.no_grad():
            teacher = distillation.teacher
            teacher_hidden = teacher.run_layers(teacher.embed(tokens))[
                learnt
            ]  # (N, teacher's hidden)
    losses = []
    for hidden in exit_hidden(model, tokens, exits, recompute):
        hidden, loss = hidden[learnt], 0.0  # (N, hidden)
        for start in range(0, max(1, len(wanted)), CHUNK):
            part = slice(start, start + CHUNK)
            taught = (distillation, teacher_hidden[part]) if distillation else ()
            loss = loss + checkpoint(
                _chunk_loss, model, hidden[part], wanted[part], *taught, use_reentrant=False
            )
        losses.append(loss)
    return torch.stack(losses) / max(1, len(wanted) if count is None else count)


def _chunk_loss(model, hidden, labels, distillation=None, teacher_hidden=None):
    """Summed loss of hidden states (N, hidden) at one exit."""
    logits = model.draft_logits(hidden).float()  # (N, V), or of the draft's vocabulary
    loss = F.cross_entropy(logits, labels, reduction="sum")
    if distillation:
        with torch.no_grad():
            teacher_logits = distillation.teacher.logits(teacher_hidden).float()
            if model.draft_vocabulary is not None:
                teacher_logits = teacher_logits[:, model.draft_vocabulary]
        loss = (
            loss + distillation.weight * divergence(distillation.kind, teacher_logits, logits).sum()
        )
    return loss


def divergence(kind, p_logits, q_logits):
    """How far the distributions of ``q_logits`` (N, V) are from those of ``p_logits`` (N, V), by row: (N,)."""
    log_p, log_q = p_logits.log_softmax(dim=-1), q_logits.log_softmax(dim=-1)
    if kind == "tv":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)
    if kind == "reverse":
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
