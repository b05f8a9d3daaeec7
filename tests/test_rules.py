"""Rejection sampling: every outcome of what is drawn and tested, see also ``test_lossless``."""

from functools import partial

import pytest
import torch
from helpers import random_distribution

from s2d.lesson import lossless
from s2d.rules import Rejection, residual
from s2d.sampling import warp


@pytest.mark.parametrize("widths", [(1, 1, 1), (3,), (2, 2), (1, 2)])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.6, 0.4])
def test_drawn_chains_and_trees_leave_the_targets_distribution(widths, top_p, monkeypatch):
    """Also where q has fewer tokens than a node has children."""
    warped = partial(warp, temperature=0.6, top_p=top_p)
    monkeypatch.setattr(lossless, "distribution", warped)
    distance, accepted, is_exact = lossless.measure(partial(Rejection, warped), widths)
    assert distance < 1e-12 and accepted > 0.5 and is_exact


def test_where_rounding_leaves_no_residual_p_itself_is_drawn_from():
    p = random_distribution(torch.Generator().manual_seed(1), 9)
    assert residual(p, p) is p
