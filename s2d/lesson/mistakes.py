"""Mistakes in the exercises. The docstring of a mistake is what a learner is told."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .answers import ancestor_mask, choose_exit


def swapped_ratio(p: Tensor, q: Tensor, token: int) -> Tensor:
    """This is q / p. A token should be refused more often if the draft proposes it more often, so
    q belongs below the line."""
    return (q[token] / p[token]).clamp(max=1.0)


def above_one(p: Tensor, q: Tensor, token: int) -> Tensor:
    """The ratio is right, but where p is larger than q it is above 1, and no probability is."""
    return p[token] / q[token]


def all_of_p(p: Tensor, q: Tensor) -> Tensor:
    """This draws from all of p. Tokens with q >= p have come out often enough by acceptance, and
    would now come out too often."""
    return p


def not_normalised(p: Tensor, q: Tensor) -> Tensor:
    """The shape is right, but a distribution sums to 1. (If you add up outcomes, make sure that
    their probabilities do, too.)"""
    return (p - q).clamp(min=0.0)


def below_zero(p: Tensor, q: Tensor) -> Tensor:
    """Some of these numbers are below 0, and no probability is. Where q > p, nothing is missing:
    replace p - q by 0 there, before you add up and divide. (All of p - q sums to 0.)"""
    return (p - q) / (p - q).sum()


def surest(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """This takes the surest exit. To know which one that is, all layers have to run, and saving
    them is the point of sorting."""
    return int(np.argmax(confidences))


def at_the_threshold(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """A confidence that equals the threshold is not enough; it has to be above."""
    just_below = [threshold - 1e-9 for threshold in thresholds]
    return choose_exit(confidences, just_below)


def causal(parents: Sequence[int]) -> np.ndarray:
    """This is the causal mask, which is right for a chain. In a tree, the nodes before a node are
    not all in its text."""
    return np.tri(len(parents), dtype=bool)


def parent_only(parents: Sequence[int]) -> np.ndarray:
    """A node attends to its parent here, but not to the parent of its parent, and so on."""
    mask = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        mask[node, parents[node]] = True
    return mask


def wrapped_round(parents: Sequence[int]) -> np.ndarray:
    """The parent -1 of the root is no node, but as an index of an array it is the last row."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent]
    return mask


def numbers_in_a_mask(parents: Sequence[int]) -> np.ndarray:
    """This mask holds numbers, and attention would add these to its scores. Return booleans: True
    where the node of the row attends to the node of the column."""
    return ancestor_mask(parents).astype(float)


def first_rows(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """The number of rows is right, and for a chain so are the rows. In a tree, accepted nodes need
    not come first."""
    return rows[: n + len(accepted)]


def one_too_far(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """Node 0 is the last token of the context, in row n - 1. So node 1 is in row n, and node i in
    row n - 1 + i."""
    return torch.cat([rows[:n], rows[[n + node for node in accepted]]])


MISTAKES = {
    "acceptance_probability": [swapped_ratio, above_one],
    "residual": [all_of_p, not_normalised, below_zero],
    "choose_exit": [surest, at_the_threshold],
    "ancestor_mask": [causal, parent_only, wrapped_round, numbers_in_a_mask],
    "kept_rows": [first_rows, one_too_far],
}
