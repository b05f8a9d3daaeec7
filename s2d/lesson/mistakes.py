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


def target_alone(p: Tensor, q: Tensor, token: int) -> Tensor:
    """This is the probability of the token in the target alone. The token is proposed with
    probability q to begin with, so it would come out with probability q * p."""
    return p[token]


def proposed_and_accepted(p: Tensor, q: Tensor, token: int) -> Tensor:
    """This is the probability that the token is proposed and accepted. It is proposed with
    probability q, so divide by that."""
    return torch.minimum(p, q)[token]


def comparison(p: Tensor, q: Tensor, token: int) -> Tensor:
    """This accepts a token always or never. If q is larger than p, some of its proposals have to
    stay, or the token would never come out of this step."""
    return (p[token] >= q[token]).double()


def greedy(p: Tensor, q: Tensor, token: int) -> Tensor:
    """This is the rule of section 2: it accepts the most probable token and no other. What comes
    out would not follow p."""
    return (p.argmax() == token).double()


def always(p: Tensor, q: Tensor, token: int) -> Tensor:
    """Everything is accepted, so what comes out follows the draft, q."""
    return torch.ones(())


# --- 2. residual ---------------------------------------------------------------------------------


def all_of_p(p: Tensor, q: Tensor) -> Tensor:
    """This draws from all of p. Tokens with q >= p have come out often enough by acceptance, and
    would now come out too often."""
    return p


def draft_again(p: Tensor, q: Tensor) -> Tensor:
    """This asks the draft again. Tokens with q > p would come out too often."""
    return q


def not_normalised(p: Tensor, q: Tensor) -> Tensor:
    """The shape is right, but a distribution sums to 1. (If you add up outcomes, make sure that
    their probabilities do, too.)"""
    return (p - q).clamp(min=0.0)


def below_zero(p: Tensor, q: Tensor) -> Tensor:
    """The difference is negative where q > p, and no probability is. There, nothing is missing."""
    return p - q


def absolute_difference(p: Tensor, q: Tensor) -> Tensor:
    """The absolute difference gives a second chance to tokens that the draft proposes too often.
    They lack nothing: where q > p, the residual is 0."""
    difference = (p - q).abs()
    return difference / difference.sum()


def softmax_of_difference(p: Tensor, q: Tensor) -> Tensor:
    """A softmax gives every token some probability. Tokens with q > p lack nothing, so theirs has
    to be 0."""
    return torch.softmax(p - q, dim=0)


def surplus_of_q(p: Tensor, q: Tensor) -> Tensor:
    """This is what q has more than p. What is missing is what p has more than q."""
    surplus = (q - p).clamp(min=0.0)
    return surplus / surplus.sum()


# --- 3. choose_exit ------------------------------------------------------------------------------


def surest(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """This takes the surest exit. To know which one that is, all layers have to run, and saving
    them is the point of sorting."""
    return int(np.argmax(confidences))


def deepest(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """This takes the deepest exit that is sure. The cheapest one comes first."""
    sure = [number for number, each in enumerate(confidences) if each > thresholds[number]]
    return sure[-1] if sure else len(confidences) - 1


def turned_round(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """The comparison is turned round: an exit drafts if its confidence is above its threshold."""
    unsure = [number for number, each in enumerate(confidences) if each < thresholds[number]]
    return unsure[0] if unsure else len(confidences) - 1


def at_the_threshold(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """A confidence that equals the threshold is not enough; it has to be above."""
    sure = [number for number, each in enumerate(confidences) if each >= thresholds[number]]
    return sure[0] if sure else len(confidences) - 1


def first_if_none(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """If no exit is sure, the last one drafts, not the first: it is right most often."""
    sure = [number for number, each in enumerate(confidences) if each > thresholds[number]]
    return sure[0] if sure else 0


def surest_if_none(confidences: Sequence[float], thresholds: Sequence[float]) -> int:
    """If no exit is sure, the last one drafts, whatever its confidence is."""
    sure = [number for number, each in enumerate(confidences) if each > thresholds[number]]
    return sure[0] if sure else int(np.argmax(confidences))


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


def not_itself(parents: Sequence[int]) -> np.ndarray:
    """A node has to attend to itself as well, as in any causal mask."""
    return answers.ancestor_mask(parents) & ~np.eye(len(parents), dtype=bool)


def wrapped_round(parents: Sequence[int]) -> np.ndarray:
    """The parent -1 is the context, but as an index of an array it is the last row."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent]
    return mask


def transposed(parents: Sequence[int]) -> np.ndarray:
    """Rows and columns have changed places: nodes attend to what comes after them."""
    return answers.ancestor_mask(parents).T


def levels_above(parents: Sequence[int]) -> np.ndarray:
    """A node attends to all nodes of the levels above it here. Only its own ancestors are in its
    text."""
    depths = answers.ancestor_mask(parents).sum(axis=1)
    return (depths[:, None] > depths[None]) | np.eye(len(parents), dtype=bool)


# --- 5. kept_rows --------------------------------------------------------------------------------


def first_rows(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """The number of rows is right, and for a chain so are the rows. In a tree, accepted nodes need
    not come first."""
    return rows[: n + len(accepted)]


def counted_from_the_start(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """Nodes are counted from the end of the context: node i is in row n + i, not in row i."""
    return torch.cat([rows[:n], rows[list(accepted)]])


def context_forgotten(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """The first n rows are missing. They belong to the context, which stays."""
    return rows[[n + node for node in accepted]]


def everything_kept(rows: Tensor, n: int, accepted: Sequence[int]) -> Tensor:
    """Nothing was rolled back: later passes would attend to nodes that were rejected."""
    return rows


MISTAKES = {
    answers.acceptance_probability: [
        swapped_ratio,
        above_one,
        target_alone,
        proposed_and_accepted,
        comparison,
        greedy,
        always,
    ],
    answers.residual: [
        all_of_p,
        draft_again,
        not_normalised,
        below_zero,
        absolute_difference,
        softmax_of_difference,
        surplus_of_q,
    ],
    answers.choose_exit: [
        surest,
        deepest,
        turned_round,
        at_the_threshold,
        first_if_none,
        surest_if_none,
    ],
    answers.ancestor_mask: [
        causal,
        parent_only,
        not_itself,
        wrapped_round,
        transposed,
        levels_above,
    ],
    answers.kept_rows: [first_rows, counted_from_the_start, context_forgotten, everything_kept],
}
