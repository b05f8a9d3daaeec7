"""Second aims of the SoFT loss: a teacher's distributions (arXiv 2310.08461), or its features.

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

    def hidden(self, tokens):
        return last_hidden(self.teacher, tokens)

    def loss(self, hidden, features, logits, vocabulary):
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


@dataclass(frozen=True)
class Alignment:
    """What ``soft_losses`` adds to bring an exit's features near those of a ``teacher``.

    S2D's ablation ("feature alignment", arXiv 2407.01955) comes without a formula. Chosen here:
    features are what the LM head reads, hidden states behind the final norm; their mean squared
    difference, times ``weight``; at every exit, as one norm and one head serve them all. Nothing
    maps one to the other: a draft that was cut from its teacher has the teacher's own features.
    """

    teacher: nn.Module
    weight: float
    kind = property(lambda self: f"features {self.weight:g}")

    def hidden(self, tokens):
        return last_hidden(self.teacher, tokens)

    def loss(self, hidden, features, logits, vocabulary):
        """How far the exit's ``features`` (N, hidden size) are from the teacher's, summed."""
        with torch.no_grad():
            taught = self.teacher.model["norm"](hidden)
        return self.weight * (features.float() - taught.float()).square().mean(dim=-1).sum()


@torch.no_grad()
def last_hidden(teacher, tokens):
    """The teacher's last hidden states (B, T, its hidden size)."""
    return teacher.run_layers(teacher.embed(tokens))
