"""Check an answer to an exercise of the lesson; a wrong one is told by its misconception."""

import random
from collections.abc import Callable
from copy import deepcopy
from inspect import getdoc
from typing import Any

import numpy as np
import torch

from . import answers
from .mistakes import MISTAKES

Case = tuple[Any, ...]  # the arguments of one call


def distributions() -> list[Case]:
    """Pairs p, q (V,) of random distributions."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.rand(6, 2, 5, dtype=torch.float64, generator=generator) ** 3
    return [tuple(pair / pair.sum(dim=1, keepdim=True)) for pair in pairs]


def drafted_tokens() -> list[Case]:
    """p, q (V,) and each of the V tokens."""
    return [(p, q, token) for p, q in distributions() for token in range(len(q))]


def confidences() -> list[Case]:
    """Confidences and thresholds of three exits; among them no sure exit, and equality."""
    rng = random.Random(0)
    cases: list[Case] = [
        ([0.6, 0.5, 0.1], [0.6, 0.4, 0.0]),
        ([0.1, 0.2, 0.3], [0.6, 0.4, 0.9]),
        ([0.3, 0.2, 0.1], [0.6, 0.4, 0.9]),
    ]
    for _ in range(30):
        cases.append(([round(rng.random(), 2) for _ in range(3)], [0.6, 0.4, 0.0]))
    return cases


def trees() -> list[Case]:
    """Parents (N,) of small trees, -1 for the context."""
    rng = random.Random(0)
    cases: list[Case] = [([-1, -1, 0, 0, 2],)]
    for size in range(1, 9):
        cases.append(([rng.randrange(-1, node) for node in range(size)],))
    return cases


def caches() -> list[Case]:
    """Rows (n + N, D), the length n of the context, and which of the N nodes were accepted."""
    cases: list[Case] = []
    for n, accepted in ((3, [0, 2, 5]), (2, [0, 1]), (4, [1, 3]), (3, [])):
        rows = 10.0 * torch.arange(n + 6)[:, None] + torch.arange(2)
        cases.append((rows, n, accepted))
    return cases


CASES: dict[Callable[..., Any], Callable[[], list[Case]]] = {
    answers.acceptance_probability: drafted_tokens,
    answers.residual: distributions,
    answers.choose_exit: confidences,
    answers.ancestor_mask: trees,
    answers.kept_rows: caches,
}


def check(name: str, function: Callable[..., Any]) -> None:
    """Print whether ``function`` is right for the exercise with this ``name``."""
    print(f"{name}: {judge(name, function)}")


def judge(name: str, function: Callable[..., Any]) -> str:
    """A sentence about ``function``, an answer to the exercise with this ``name``."""
    answer = getattr(answers, name)
    cases = CASES[answer]()
    results = []
    for case in cases:
        try:
            results.append(function(*deepcopy(case)))  # it may change what it is given
        except NotImplementedError:
            return "not filled in yet."
        except Exception as error:  # whatever a learner's function does
            return f"{call_of(name, case)} raises {type(error).__name__}: {error}"
    expected = [answer(*case) for case in cases]
    if all(map(same, results, expected)):
        return "right!"
    for mistake in MISTAKES[answer]:
        if all(map(same, results, (mistake(*case) for case in cases))):
            return " ".join(getdoc(mistake).split())
    wrong = [same(*pair) for pair in zip(results, expected)].index(False)
    right = text_of(expected[wrong])
    return f"{call_of(name, cases[wrong])} should be {right}; yours is {text_of(results[wrong])}"


def same(found: Any, expected: Any) -> bool:
    """Whether two results have one shape and, but for rounding, one value."""
    found = as_numbers(found)
    expected = as_numbers(expected)
    if found is None or found.shape != expected.shape:
        return False
    return np.allclose(found, expected, rtol=0, atol=1e-6)


def as_numbers(value: Any) -> np.ndarray | None:
    """``value`` as an array, or None if it is nothing of the kind."""
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().double()
        return np.asarray(value, dtype=float)
    except Exception:  # whatever a learner's function returns
        return None


def call_of(name: str, case: Case) -> str:
    return f"{name}({', '.join(map(text_of, case))})"


def text_of(value: Any) -> str:
    """A result or an argument, briefly."""
    numbers = as_numbers(value) if isinstance(value, torch.Tensor | np.ndarray) else None
    return repr(value) if numbers is None else repr(numbers.round(3).tolist())
