"""Mistakes that people make in the exercises of the lesson. The docstring tells what is wrong."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import answers

# --- 1. acceptance_probability -------------------------------------------------------------------


def swapped_ratio(p: Tensor, q: Tensor, token: int) -> Tensor:
    """This is q / p. A token should be refused more often if the draft proposes it more often, so
    q belongs below the line."""
    return (q[token] / p[token]).clamp(max=1.0)


def above_one(p: Tensor, q: Tensor, token: int) -> Tensor:
    """The ratio is right, but where p is larger than q it is above 1, and no probability is."""
    return p[token] / q[token]


def always(p: Tensor, q: Tensor, token: int) -> Tensor:
    """Everything is accepted, so what comes out follows the draft, q."""
    return torch.ones(())


# --- 2. residual ---------------------------------------------------------------------------------


def all_of_p(p: Tensor, q: Tensor) -> Tensor:
    """This draws from all of p. Tokens with q >= p have come out often enough by acceptance, and
    would now come out too often."""
    return p


def not_normalised(p: Tensor, q: Tensor) -> Tensor:
    """The shape is right, but a distribution sums to 1. (If you add up outcomes, make sure that
    their probabilities do, too.)"""
    return (p - q).clamp(min=0.0)


def absolute_difference(p: Tensor, q: Tensor) -> Tensor:
    """The absolute difference gives a second chance to tokens that the draft proposes too often.
    They lack nothing: where q > p, the residual is 0."""
    difference = (p - q).abs()
    return difference / difference.sum()


# --- 3. choose_exit ------------------------------------------------------------------------------


def surest(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """This takes the surest exit. To know which one that is, all layers have to run, and saving
    them is the point of sorting."""
    return int(np.argmax(confidences))


def at_the_threshold(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """A confidence that equals the threshold is not enough; it has to be above."""
    sure = [number for number, each in enumerate(confidences) if each >= thresholds[number]]
    return sure[0] if sure else len(confidences) - 1


def first_if_none(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """If no exit is sure, the last one drafts, not the first: it is right most often."""
    sure = [number for number, each in enumerate(confidences) if each > thresholds[number]]
    return sure[0] if sure else 0


# --- 4. ancestor_mask ----------------------------------------------------------------------------


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
    """The parent -1 is the context, but as an index of an array it is the last row."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent]
    return mask


# --- 5. kept_rows --------------------------------------------------------------------------------


def first_rows(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """The number of rows is right, and for a chain so are the rows. In a tree, accepted nodes need
    not come first."""
    return rows[: n + len(accepted)]


def counted_from_the_start(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """Nodes are counted from the end of the context: node i is in row n + i, not in row i."""
    return torch.cat([rows[:n], rows[list(accepted)]])


MISTAKES = {
    answers.acceptance_probability: [swapped_ratio, above_one, always],
    answers.residual: [all_of_p, not_normalised, absolute_difference],
    answers.choose_exit: [surest, at_the_threshold, first_if_none],
    answers.ancestor_mask: [causal, parent_only, wrapped_round],
    answers.kept_rows: [first_rows, counted_from_the_start],
}
