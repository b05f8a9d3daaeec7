"""What calls cost on this machine: timed once, kept in the user's cache directory.

The costs choose the matmul of one row (speed/linear.py), and how many nodes of a tree to send to
the target (ngram/costs.py). Remove costs.json to have everything timed again.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import torch

from .files import read_json, staged_file

ROUNDS = 6  # of timing; the fastest counts


def cache_folder() -> Path:
    """XDG_CACHE_HOME/s2d or ~/.cache/s2d; FileNotFoundError if the user has neither."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "s2d"
    except RuntimeError:  # no HOME, and a user whom the system does not know, as in containers
        message = "there is no home directory to keep files in; set XDG_CACHE_HOME to a folder"
        raise FileNotFoundError(message) from None


def key_of(*parts):
    """A name for what depends on ``parts``, the machine, the threads and PyTorch's version."""
    machine = platform.node(), torch.cpu.get_capabilities(), torch.get_num_threads()
    return sha256(repr((machine, torch.__version__, parts)).encode()).hexdigest()[:32]


def timed_once(
    what: Any, names: Sequence[str | int], measure: Callable[[], list[float]]
) -> dict[str | int, float]:
    """{name: seconds}, as ``measure()`` gives them in the order of ``names``.

    What costs.json holds under ``what`` since an earlier run is not measured again.
    """
    key = key_of(what, names)
    known = known_costs()
    if len(known.get(key, ())) != len(names):
        known[key] = measure()
        with suppress(OSError, ValueError):  # nowhere to keep it: timed again
            with staged_file(cache_folder() / "costs.json") as stage:
                stage.write_text(json.dumps(known, indent=1))
    return dict(zip(names, known[key]))


def known_costs() -> dict[str, list[float]]:
    """What costs.json holds, but for what is no list of seconds."""
    with suppress(OSError, ValueError):  # no folder for it, or damaged
        held = read_json(cache_folder() / "costs.json", missing={})
        return {key: value for key, value in held.items() if are_seconds(value)}
    return {}


def are_seconds(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(each, float) and 0 < each < inf for each in value)


def fastest_calls(function, arguments):
    """Seconds of the fastest call of ``function`` with each of ``arguments``, as a list."""
    best = [torch.inf] * len(arguments)
    for _ in range(ROUNDS):
        for i, argument in enumerate(arguments):  # in turns: a slow moment hits all alike
            began = time.perf_counter()
            function(argument)
            best[i] = min(best[i], time.perf_counter() - began)
    return best
