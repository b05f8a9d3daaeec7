"""What passes and matmuls cost on this machine: timed once, kept in the user's cache directory.

The costs choose the matmul of one row (linear.py), and how many nodes of a tree to send to the
target (tree_size.py). Remove costs.json to have everything timed again.
"""

import json
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import torch

from ..files import read_json, staged_file
from . import DTYPES

SIZES = 1, 2, 4, 8, 16  # rows of the passes that are timed
CONTEXT = 400  # cached positions that they attend to
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


def pass_seconds(model, rows):
    """Seconds of passes of ``model`` over 1, 2, ... ``rows`` rows, or None.

    Known on a CPU, in float32 or bfloat16. Passes over each of SIZES are timed. A number of rows
    between two of them costs as the larger; each row beyond them as much as the last ones.
    """
    long_enough = model.config.max_position_embeddings >= CONTEXT + SIZES[-1]
    if model.device.type != "cpu" or model.dtype not in DTYPES or not long_enough:
        return None
    what = ["passes", type(model).__name__, model.config, model.dtype]
    seconds = [*timed_once(what, SIZES, lambda: time_passes(model)).values()]
    per_row = max(0.0, seconds[-1] - seconds[-2]) / (SIZES[-1] - SIZES[-2])
    costs = [seconds[bisect_left(SIZES, count)] for count in range(1, SIZES[-1] + 1)]
    costs += [seconds[-1] + per_row * more for more in range(1, rows - SIZES[-1] + 1)]
    return costs[:rows]


@torch.inference_mode()
def time_passes(model):
    """Seconds of passes of ``model`` over each of SIZES rows, after CONTEXT cached positions."""
    cache = model.new_cache(CONTEXT + SIZES[-1])
    cache.advance(CONTEXT)

    def run(rows):
        hidden = model.embed(torch.zeros(1, rows, dtype=torch.long, device=model.device))
        mask = hidden.new_full((rows, CONTEXT + rows), -torch.inf).triu(CONTEXT + 1)
        model.logits(model.run_layers(hidden, mask=mask, cache=cache)[0])
        cache.keep(CONTEXT, [])

    return fastest_calls(run, SIZES)
