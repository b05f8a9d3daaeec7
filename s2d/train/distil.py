"""Distillation: exits also learn the distributions of a teacher (DistillSpec, arXiv 2310.08461).

Knows nothing about exits and data.
"""

from dataclasses import dataclass

import torch
from torch import nn

DIVERGENCES = ("forward", "reverse", "tv")


@dataclass(frozen=True)
class Distillation:
    """What ``soft_losses`` adds to the cross entropy for a ``teacher``.

    ``kind``, for the teacher's p and an exit's q: "forward" is KL(p || q), "reverse" KL(q || p),
    "tv" the total variation (section 3 of the paper).
    """

    teacher: nn.Module
    kind: str

    @torch.no_grad()
    def hidden(self, tokens):
        """The teacher's last hidden states (B, T, its hidden size)."""
        return self.teacher.run_layers(self.teacher.embed(tokens))

    def loss(self, hidden, logits, vocabulary):
        """How far the exit's ``logits`` (N, V) are where the teacher has ``hidden``, summed."""
        with torch.no_grad():
            teacher_logits = self.teacher.logits(hidden).float()
            if vocabulary is not None:
                teacher_logits = teacher_logits[:, vocabulary]
        log_p, log_q = teacher_logits.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        if self.kind == "tv":
            return 0.5 * (log_p.exp() - log_q.exp()).abs().sum()
        if self.kind == "reverse":
            log_p, log_q = log_q, log_p
        return (log_p.exp() * (log_p - log_q)).sum()
