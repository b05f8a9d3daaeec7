"""A second term of the SoFT loss: at every exit, a draft also imitates a teacher."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..model import Llama
from ..soft import cross_entropy, exit_states, sum_of_chunks


@dataclass(frozen=True)
class Teacher:
    """A model with the draft's vocabulary, which the draft is to imitate.

    By default it learns the teacher's distributions: the term is KL(p || q), where the teacher has
    p and an exit q (arXiv 2310.08461, section 3). With ``align`` it learns features instead, as in
    S2D's ablation, which comes without a formula. Chosen here: features are what the LM head reads,
    and the term is their mean squared difference, times ``align``.
    """

    model: Llama = field(repr=False)
    align: float | None = None

    def loss(self, draft: Llama, hidden: Tensor, labels: Tensor, taught: Tensor) -> Tensor:
        """Cross entropy and the term, for hidden states and the teacher's features, over N."""
        loss = cross_entropy(draft, hidden, labels)
        if self.align is not None:
            difference = draft.model.norm(hidden).float() - taught.float()  # (N, hidden)
            return loss + self.align * difference.square().mean(dim=-1).sum()
        with torch.no_grad():
            log_p = self.model.lm_head(taught).float().log_softmax(dim=-1)  # (N, V)
        log_q = draft.logits(hidden).float().log_softmax(dim=-1)  # (N, V)
        return loss + (log_p.exp() * (log_p - log_q)).sum()

    def losses(self, draft: Llama, tokens: Tensor, labels: Tensor, exits: Sequence[int]) -> Tensor:
        """As ``soft_losses``, with the teacher's term added at every exit."""
        learnt = labels != -100  # (B, T)
        with torch.no_grad():  # what the teacher's LM head reads
            states = self.model.run_layers(self.model.embed(tokens))
            taught = self.model.model.norm(states[learnt])  # (N, the teacher's hidden size)
        losses = []
        for states in exit_states(draft, tokens, exits):
            rows = states[learnt], labels[learnt], taught  # N of each
            losses.append(sum_of_chunks(partial(self.loss, draft), *rows))
        return torch.stack(losses)
