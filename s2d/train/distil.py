"""Distillation: exits also learn the distributions of a teacher (DistillSpec, arXiv 2310.08461).

Knows nothing about exits and data.
"""

from dataclasses import dataclass

import torch
from torch import nn

DIVERGENCES = ("forward", "reverse", "tv")


@dataclass(frozen=True)
class Distillation:
    """What ``soft_losses`` adds for a ``teacher`` with distributions p, where an exit has q.

    ``kind``: "forward" is KL(p || q), "reverse" KL(q || p), "tv" the total variation (section 3).
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
            taught = self.teacher.logits(hidden).float()
            taught = taught if vocabulary is None else taught[:, vocabulary]
        log_p, log_q = taught.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        if self.kind == "tv":
            return 0.5 * (log_p.exp() - log_q.exp()).abs().sum()
        if self.kind == "reverse":
            log_p, log_q = log_q, log_p
        return (log_p.exp() * (log_p - log_q)).sum()
