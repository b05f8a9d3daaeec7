"""Mistakes in the exercises, and symptoms of mistakes in results. A docstring is what is said."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def swapped_ratio(p: Tensor, q: Tensor, token: int) -> Tensor:
    """This is q / p. A token should be refused more often if the draft proposes it more often, so
    q belongs below the line."""
    return (q[token] / p[token]).clamp(max=1.0)


def above_one(p: Tensor, q: Tensor, token: int) -> Tensor:
    """The ratio is right, but where p is larger than q it is above 1, and no probability is."""
    return p[token] / q[token]


def yes_or_no(results: list[np.ndarray]) -> bool:
    """This says whether the token is accepted. Return the probability that it is, a number from 0
    to 1, and draw nothing."""
    return all(each.size == 1 and each in (0, 1) for each in results)


def all_of_p(p: Tensor, q: Tensor) -> Tensor:
    """This draws from all of p. Tokens with q >= p have come out often enough by acceptance, and
    would now come out too often."""
    return p


def not_normalised(p: Tensor, q: Tensor) -> Tensor:
    """The shape is right, but a distribution sums to 1. (If you add up outcomes, make sure that
    their probabilities do, too.)"""
    return (p - q).clamp(min=0.0)


def one_token(results: list[np.ndarray]) -> bool:
    """This is a single number. Return the probabilities of all tokens, and draw nothing."""
    return all(each.size == 1 for each in results)


def below_zero(results: list[np.ndarray]) -> bool:
    """Some of these numbers are below 0, or not finite, and no probability is. Where q > p, nothing
    is missing: replace p - q by 0 there, before you add up and divide. (All of p - q sums to 0.)"""
    return not all(np.all(each >= 0) and np.isfinite(each).all() for each in results)


def surest(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """This takes the surest exit. To know which one that is, all layers have to run, and saving
    them is the point of sorting."""
    return int(np.argmax(confidences))


def at_the_threshold(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """A confidence that equals the threshold is not enough; it has to be above."""
    for number, confidence in enumerate(confidences):
        if confidence >= thresholds[number]:
            return number
    return len(confidences) - 1


def causal(parents: Sequence[int]) -> np.ndarray:
    """This is the causal mask, which is right for a chain. In a tree, the nodes before a node are
    not all in its text."""
    return np.tri(len(parents), dtype=bool)


def parent_only(parents: Sequence[int]) -> np.ndarray:
    """A node attends to its parent here, but not to the parent of its parent, and so on."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node, parent] = True
    return mask


def wrapped_round(parents: Sequence[int]) -> np.ndarray:
    """The parent -1 of the root is no node, but as an index of an array it is the last row."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent]
    return mask


def numbers_in_a_mask(results: list[np.ndarray]) -> bool:
    """This mask holds numbers, and attention would add these to its scores. Return booleans: True
    where the node of the row attends to the node of the column."""
    return all(each.dtype != bool for each in results)


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
    "residual": [all_of_p, not_normalised],
    "choose_exit": [surest, at_the_threshold],
    "ancestor_mask": [causal, parent_only, wrapped_round],
    "kept_rows": [first_rows, one_too_far],
}
SYMPTOMS = {
    "acceptance_probability": [yes_or_no],
    "residual": [one_token, below_zero],
    "ancestor_mask": [numbers_in_a_mask],
}
