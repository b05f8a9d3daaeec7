"""Mark an answer to an exercise of the lesson. A wrong one is told by its misconception."""

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from inspect import getdoc
from itertools import starmap
from types import FrameType
from typing import Any

import numpy as np
import torch

from . import answers
from .mistakes import MISTAKES, SYMPTOMS

Function = Callable[..., Any]
Case = tuple[Any, ...]  # the arguments of one call
FITTING = {"b": "b", "i": "iu", "f": "biuf"}  # kinds of NumPy's dtypes: expected -> possible
NO_NUMBERS = np.empty(0, dtype=bool)


def make_cases() -> dict[str, list[Case]]:
    """By the name of an exercise: arguments for it."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(6, 2, 5, dtype=torch.float64, generator=generator) ** 3
    pairs = [tuple(pair / pair.sum(dim=1, keepdim=True)) for pair in weights]  # p and q (V,)
    confidences: list[Case] = [
        ([0.6, 0.5, 0.1], [0.6, 0.4, 0.0]),  # the first one equals its threshold
        ([0.1, 0.2, 0.3], [0.6, 0.4, 0.9]),  # no exit is sure
        ([0.3, 0.2, 0.1], [0.6, 0.4, 0.9]),
    ]
    for count in [3, 2, 4] * 10:
        found, thresholds = ([round(rng.random(), 2) for _ in range(count)] for _ in "ab")
        confidences.append((found, thresholds))
    trees = [[-1, 0, 0, 1, 1, 3], [-1, *range(7)]]  # parents (N+1,); the second one is a chain
    for size in range(1, 10):
        trees.append([-1, *map(rng.randrange, range(1, size))])
    rows = 10.0 * torch.arange(10)[:, None] + torch.arange(2)
    accepted = [(3, [1, 3, 5]), (2, [1, 2]), (4, [2, 4]), (3, [])]  # and n
    return {
        "acceptance_probability": [(p, q, token) for p, q in pairs for token in range(5)],
        "residual": pairs,
        "choose_exit": confidences,
        "ancestor_mask": [(parents,) for parents in trees],
        "kept_rows": [(rows, n, nodes) for n, nodes in accepted],
    }


def mark(name: str, function: Function) -> None:
    """Print whether ``function`` is right for the exercise with this ``name``."""
    print(f"{name}: {comment_on(name, function)}")


def comment_on(name: str, function: Function) -> str:
    """A sentence about ``function``, an answer to the exercise with this ``name``."""
    cases = make_cases()[name]
    results = []
    for case in cases:
        try:
            result, helper = call(function, deepcopy(case))  # it may change what it is given
        except NotImplementedError:
            return "not filled in yet."
        except Exception as error:  # whatever a learner's function does
            return f"{shown_call(name, case)} raises {type(error).__name__}: {error}"
        if helper:
            return f"this calls {helper}, a function of the project. Write it yourself."
        if result is None:
            return "this returns None. Does it end with return and the result?"
        results.append(result)
    return comment_on_results(name, cases, results)


def call(function: Function, case: Case) -> tuple[Any, str]:
    """What ``function`` returns, and which function of the project it called, "" if none."""
    called = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("s2d."):
            called.append(frame.f_code.co_name)

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function(*case)
    finally:
        sys.setprofile(previous)
    return result, called[0] if called else ""


def comment_on_results(name: str, cases: list[Case], results: list[Any]) -> str:
    """A sentence about the ``results`` of a function, one for each of ``cases``."""
    answer = getattr(answers, name)
    expected = [answer(*case) for case in cases]
    right = list(map(same, results, expected))
    if all(right):
        return "right!"
    made = [each for each in MISTAKES[name] if all(map(same, results, starmap(each, cases)))]
    numbers = list(map(as_numbers, results))
    made += [each for each in SYMPTOMS.get(name, []) if each(numbers)]
    if made:
        return " ".join(getdoc(made[0]).split())
    wrong = right.index(False)
    words = f"{shown_call(name, cases[wrong])} should be {shown(expected[wrong])}"
    return f"{words}; yours is {shown(results[wrong])}"


def same(found: Any, expected: Any) -> bool:
    """Whether two results have one shape, fitting dtypes and, but for rounding, one value."""
    found = as_numbers(found)
    expected = as_numbers(expected)
    if found.shape != expected.shape or found.dtype.kind not in FITTING[expected.dtype.kind]:
        return False
    return np.allclose(found, expected, rtol=0, atol=1e-6)


def as_numbers(value: Any) -> np.ndarray:
    """``value`` as an array of numbers or booleans, an empty one if it is nothing of the kind."""
    try:
        numbers = np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)
    except Exception:  # whatever a learner's function returns
        return NO_NUMBERS
    return numbers if numbers.dtype.kind in "biuf" else NO_NUMBERS


def shown_call(name: str, case: Case) -> str:
    """A call of an exercise; where no node is accepted, with what follows from that."""
    call = f"{name}({', '.join(map(shown, case))})"
    if case[-1] == []:
        return f"If no node is accepted, only the rows of the context stay: {call}"
    return call


def shown(value: Any) -> str:
    """A result or an argument, briefly."""
    if isinstance(value, torch.Tensor | np.ndarray) and as_numbers(value).size:
        return repr(np.round(1 * as_numbers(value), 3).tolist())  # True is shown as 1
    return repr(value)
