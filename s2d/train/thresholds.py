"""Thresholds of a trained draft's exits, measured on rows that it has not learnt from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model import Llama
from ..soft import exit_states
from .data import Rows

HELD_OUT = 64  # rows, at most
FEWEST = 1000  # labelled tokens from which thresholds mean something
LOST = 0.01  # the part of the last exit's right tokens that an exit before it may lose


def hold_out(rows: Rows, batch: int) -> tuple[Rows, Rows]:
    """The rows to learn from, at least a ``batch``, and the last twentieth, which is held out."""
    tokens, labels = rows
    kept = max(batch, len(tokens) - min(HELD_OUT, len(tokens) // 20))
    return (tokens[:kept], labels[:kept]), (tokens[kept:], labels[kept:])


@torch.no_grad()
def measure_thresholds(model: Llama, rows: Rows, exits: Sequence[int]) -> tuple[float, ...]:
    """A threshold for each of ``exits``, by ``lowest_threshold``; the last exit always drafts.

    The ``rows`` are some that the model has not learnt from, with FEWEST labelled tokens or more.
    """
    parts = []
    for tokens, labels in zip(*(each.to(model.device) for each in rows)):
        parts.append(predict(model, tokens[None], labels[None], exits))
    confidence, right = torch.cat(parts, dim=2)  # (E, N) each
    before_last = zip(confidence[:-1], right[:-1])
    thresholds = [lowest_threshold(*each, right_at_last=right[-1]) for each in before_last]
    return (*thresholds, 0.0)


def predict(model: Llama, tokens: Tensor, labels: Tensor, exits: Sequence[int]) -> Tensor:
    """(2, E, N): each exit's confidence at N labelled tokens, and 1 where its choice is right."""
    learnt = labels != -100
    found = []
    for states in exit_states(model, tokens, exits):
        probs = model.logits(states[learnt]).float().softmax(dim=-1)  # (N, V)
        confidence, choices = probs.max(dim=-1)
        found.append(torch.stack((confidence, choices == labels[learnt])))
    return torch.stack(found, dim=1)


def lowest_threshold(confidence: Tensor, right: Tensor, right_at_last: Tensor) -> float:
    """The lowest threshold from which on an exit is almost as good as the last one.

    An exit drafts where its ``confidence`` (N,) is above the threshold, and is ``right`` (N,) at
    some of these tokens, as the last exit would have been. The exit may lose a hundredth (LOST) of
    all tokens at which the last exit is right. An example: of 1000 tokens the last exit gets 900
    right, so 9 may be lost. Above 0.7 the last exit gets 5 tokens more right than this one, above
    0.6 it is 9, and above 0.5 it is 20. Then the threshold is 0.6.
    """
    order = confidence.argsort(descending=True)
    lost = (right_at_last - right)[order].cumsum(dim=0)  # (N,)
    enough = confidence[order][lost <= LOST * right_at_last.sum()].tolist()
    return round([1.0, *enough][-1], 3)
