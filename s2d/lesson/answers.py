"""The answers to the exercises of the lesson. Try them yourself first."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def acceptance_probability(p: Tensor, q: Tensor, token: int) -> Tensor:
    """A token that is proposed too often (q > p) stays in p / q of the cases; others always stay.

    In the project: ``rules.test_children``.
    """
    return (p[token] / q[token]).clamp(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What p has more than q, as a distribution. In the project: ``rules.residual``."""
    missing = (p - q).clamp(min=0.0)
    return missing / missing.sum()


def choose_exit(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """In the project: ``SortedDraft.choose_exit``, which asks no exit after the one it takes."""
    for number, confidence in enumerate(confidences):
        if confidence > thresholds[number]:
            return number
    return len(confidences) - 1


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """A node attends to what its parent attends to, and to itself.

    In the project: ``mask.inputs``, by the path of each node.
    """
    mask = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def kept_rows(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """In the project: ``model.KVCache.keep``, which moves the rows inside the cache."""
    return torch.cat([rows[:n], rows[[n - 1 + node for node in accepted]]])
