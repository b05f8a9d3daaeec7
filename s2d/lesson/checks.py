"""Mark an answer to an exercise of the lesson. A wrong one is told by its misconception."""

from collections.abc import Callable
from copy import deepcopy
from inspect import getdoc
from typing import Any

import numpy as np
import torch

from . import answers
from .mistakes import MISTAKES


def make_cases() -> dict[str, list[tuple[Any, ...]]]:
    """By the name of an exercise: the arguments of some calls."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(6, 2, 5, dtype=torch.float64, generator=generator) ** 3
    pairs = [tuple(pair / pair.sum(dim=1, keepdim=True)) for pair in weights]  # p and q (V,)
    trees = [[-1], [-1, 0, 1, 2, 3], [-1, 0, 0, 1, 1, 3], [-1, 0, 1, 0, 3, 1, 4]]  # parents (N+1,)
    rows = 10.0 * torch.arange(10)[:, None] + torch.arange(2)
    accepted = [(3, [1, 3, 5]), (2, [1, 2]), (4, [2, 4]), (3, [])]  # and n
    return {
        "acceptance_probability": [(p, q, token) for p, q in pairs for token in range(5)],
        "residual": pairs,
        "choose_exit": [
            ([0.6, 0.5, 0.1], [0.6, 0.4, 0.0]),  # the first one equals its threshold
            ([0.1, 0.2, 0.3], [0.6, 0.4, 0.9]),  # no exit is sure
            ([0.3, 0.2, 0.1], [0.6, 0.4, 0.9]),
            ([0.7, 0.8, 0.9, 0.2], [0.8, 0.7, 0.5, 0.3]),
            ([0.5, 0.9], [0.4, 0.4]),
        ],
        "ancestor_mask": [(parents,) for parents in trees],
        "kept_rows": [(rows, n, nodes) for n, nodes in accepted],
    }


def mark(name: str, function: Callable[..., Any]) -> str:
    """A sentence about ``function``, an answer to the exercise with this ``name``."""
    answer = getattr(answers, name)
    cases = make_cases()[name]
    results = []
    first_wrong = ""
    for case in cases:
        call = f"{name}({', '.join(map(shown, case))})"
        try:
            result = function(*deepcopy(case))  # it may change what it is given
        except NotImplementedError:
            return "not filled in yet."
        except Exception as error:  # whatever a learner's function does
            return f"{call} raises {type(error).__name__}: {error}"
        if result is None:
            return "this returns None. Does it end with return and the result?"
        results.append(result)
        expected = answer(*case)
        if not first_wrong and not same(result, expected):
            first_wrong = f"{call} should be {shown(expected)}; yours is {shown(result)}"
    if not first_wrong:
        return "right!"
    for mistake in MISTAKES[name]:
        if all(same(result, mistake(*case)) for result, case in zip(results, cases)):
            return " ".join(getdoc(mistake).split())
    return first_wrong


def same(found: Any, expected: Any) -> bool:
    """Whether two results have one shape and, but for rounding, one value. Masks are booleans."""
    try:
        found = torch.as_tensor(found)
    except Exception:  # whatever a learner's function returns
        return False
    expected = torch.as_tensor(expected)
    masks = [each.dtype == torch.bool for each in (found, expected)]
    if found.shape != expected.shape or masks[0] != masks[1]:
        return False
    return torch.allclose(found.double(), expected.double(), rtol=0, atol=1e-6)


def shown(value: Any) -> str:
    """A result or an argument, briefly."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return repr(np.round(1 * np.asarray(value), 3).tolist())  # True is shown as 1
    return repr(value)
