"""Random draws that ``law`` cannot take as forks: they are found, and refused by their names."""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

MODULES = {random: {"random", "getstate"}, np.random: {"get_state"}}  # and what is not refused


def states() -> dict[str, Any]:
    """The states of the generators that are shared. A draw that is a fork leaves them alone."""
    _, keys, *position = np.random.get_state()
    return {
        "PyTorch": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "NumPy": (keys.tobytes(), position),
    }


def refused(name: str) -> type:
    """A class in the place of a function or class that draws: who calls it is told its name."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"the program draws by {name}, which is not seen")

    return type(name, (), {"__new__": refuse})


def exchange(others: dict[int, Any]) -> None:
    """Give names in all modules other objects, by the ids of those that they have."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("__package__") == "numpy.random" != names.get("__name__"):
            continue  # NumPy's own files
        for name, value in list(names.items()):
            if id(value) in others:
                names[name] = others[id(value)]


@contextmanager
def other_names(others: dict[Any, Any]) -> Iterator[None]:
    """Each key of ``others`` is exchanged for its value, under whatever name it was imported.

    What else draws in ``random`` and NumPy, and ``os.urandom``, is refused when it is called.
    """
    others = others | {os.urandom: refused("os.urandom")}
    for module, kept in MODULES.items():
        for name in {*module.__all__} - kept:
            others[getattr(module, name)] = refused(f"{module.__name__}.{name}")
    exchange({id(original): other for original, other in others.items()})
    try:
        yield
    finally:
        exchange({id(other): original for original, other in others.items()})
