"""What calls cost on this machine: timed once, kept in the user's cache directory.

The costs choose how weights are laid out (speed/layout.py), and how many nodes of a tree to send to
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
from statistics import median
from typing import Any

import torch

from .files import read_json, staged_file

ROUNDS = 6  # of timing; the fastest counts
INSTRUCTION_LIMITS = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"  # users may set them
QUIET = 1.5  # how much longer than the fastest call most calls may take on a quiet machine


def cache_folder() -> Path:
    """XDG_CACHE_HOME/s2d or ~/.cache/s2d; FileNotFoundError if the user has neither."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "s2d"
    except RuntimeError:  # no HOME, and a user whom the system does not know, as in containers
        message = "there is no home directory to keep files in; set XDG_CACHE_HOME to a folder"
        raise FileNotFoundError(message) from None


def key_of(*parts: Any) -> str:
    """A name for what depends on ``parts``, the machine, the threads and PyTorch's version."""
    limits = [os.environ.get(name) for name in INSTRUCTION_LIMITS]
    machine = (platform.node(), torch.cpu.get_capabilities(), limits, torch.get_num_threads())
    return sha256(repr((machine, torch.__version__, parts)).encode()).hexdigest()[:32]


def timed_once(
    what: Any, cases: Sequence[Any], measure: Callable[[], list[list[float]]]
) -> dict[Any, float]:
    """{case: seconds} for each of ``cases``, measured once on this machine.

    ``measure()`` returns the seconds of several calls for each case; the fastest call counts. The
    results are kept in costs.json under ``what`` and ``cases``, and later runs read them there. If
    most calls took much longer than the fastest, the machine was busy, and nothing is kept.
    """
    key = key_of(what, cases)
    known = known_costs()
    if len(known.get(key, ())) != len(cases):
        seconds = measure()
        known[key] = [min(each) for each in seconds]
        if all(median(each) <= QUIET * min(each) for each in seconds):
            with suppress(OSError, ValueError):  # nowhere to keep it: timed again
                with staged_file(cache_folder() / "costs.json") as stage:
                    stage.write_text(json.dumps(known, indent=1))
    return dict(zip(cases, known[key]))


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


def time_calls(function: Callable[[Any], None], arguments: Sequence[Any]) -> list[list[float]]:
    """The seconds of ROUNDS calls of ``function`` with each of ``arguments``."""
    seconds: list[list[float]] = [[] for _ in arguments]
    for _ in range(ROUNDS):
        for own, argument in zip(seconds, arguments):  # in turns: a slow moment hits all alike
            began = time.perf_counter()
            function(argument)
            own.append(time.perf_counter() - began)
    return seconds
