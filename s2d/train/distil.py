"""Second terms of the SoFT loss: a teacher's distributions (arXiv 2310.08461), or its features."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model import Llama


@dataclass(frozen=True)
class Distillation:
    """What ``soft_losses`` adds: KL(p || q) where a ``teacher`` has p, an exit q (section 3)."""

    teacher: Llama

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        return self.teacher.run_layers(self.teacher.embed(tokens))  # (B, T, its hidden size)

    def loss(self, taught: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        """How far the exit's ``logits`` (N, V) are from those of the teacher's hidden states."""
        with torch.no_grad():
            log_p = self.teacher.logits(taught).float().log_softmax(dim=-1)  # (N, V)
        return (log_p.exp() * (log_p - logits.log_softmax(dim=-1))).sum()


@dataclass(frozen=True)
class Alignment(Distillation):
    """What ``soft_losses`` adds to bring an exit's features near those of a ``teacher``.

    S2D's ablation ("feature alignment", arXiv 2407.01955) comes without a formula. Chosen here:
    features are what the LM head reads, hidden states after the final norm; their mean squared
    difference, times ``weight``; at every exit, as one norm and one head serve them all. Nothing
    maps one to the other: a draft that was cut from its teacher has the teacher's own features.
    """

    weight: float

    def loss(self, taught: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        """How far the exit's ``features`` (N, hidden size) are from the teacher's, summed."""
        with torch.no_grad():
            expected = self.teacher.model.norm(taught)
        return self.weight * (features.float() - expected.float()).square().mean(dim=-1).sum()
