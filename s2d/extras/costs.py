"""What passes and products cost on this machine: timed once, and kept in the user's cache.

Knows nothing about drafts. What is kept makes every run choose the same. It is timed anew where
anything that it depends on is another one, or where the record is damaged.
"""

import json
import os
import time
from bisect import bisect_left
from contextlib import suppress
from math import inf

import torch
from torch.nn.attention import sdpa_kernel

from ..files import staged_file
from ..model import DECODING_KERNELS
from ..user_cache import key_of, machine, private_folder

SIZES = 1, 2, 4, 8, 16  # rows that are timed
# With these a processor looks like a lesser one to the libraries.
VARIABLES = "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"
CONTEXT = 400  # positions behind which a pass is timed
ROUNDS = 5
STEADY = 1.3  # times as long: a second timing that takes no more agrees
HOPELESS = 3.0  # times as slow as another


def size_of(rows):
    """The place in SIZES of what so many rows cost: a number between two costs as the larger."""
    return bisect_left(SIZES, rows)


def quickest(timed):
    """{name: seconds for each of SIZES} -> the name of the quickest, for each of SIZES."""
    return [min(timed, key=lambda name: timed[name][i]) for i in range(len(SIZES))]


def kept(what, measure):
    """``measure()``, {name: seconds for each of SIZES}, or what was kept of it under ``what``."""
    here = machine(), torch.get_num_threads(), [os.environ.get(name) for name in VARIABLES]
    try:
        file = private_folder("costs") / f"{key_of((here, what))}.json"
    except (OSError, ValueError):  # there is no place to keep it
        return measure()
    found = read(file)
    if found is None:
        both = measure(), measure()
        found = {name: [*map(min, *(each[name] for each in both))] for name in both[0]}
        if agree(*both):  # else the machine was busy with something else
            text = json.dumps(found)
            with suppress(OSError):  # a full disk: it is timed again
                with staged_file(file) as stage:
                    stage.write_text(f"{key_of(text)}\n{text}\n")
                file.chmod(0o600)
    return found


def agree(first, second):
    """Whether the quickest of two timings are nearly as long, for each of SIZES."""
    pairs = zip(*([*map(min, zip(*each.values()))] for each in (first, second)))
    return all(max(pair) < STEADY * min(pair) for pair in pairs)


def read(file):
    """What was kept there; None where there is nothing, or it is damaged in any way."""
    try:
        checksum, text = file.read_text().splitlines()
    except (OSError, ValueError):
        return None
    return json.loads(text) if checksum == key_of(text) else None


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def time_passes(model):
    """Seconds of passes of ``model`` over each of SIZES rows behind CONTEXT positions."""
    context = min(CONTEXT, model.config.max_position_embeddings - SIZES[-1])
    cache = model.new_cache(context + SIZES[-1])
    tokens = torch.zeros(1, max(context, SIZES[-1]), dtype=torch.long)
    model.run_layers(model.embed(tokens[:, :context]), cache=cache)

    def one(rows):
        hidden = model.run_layers(model.embed(tokens[:, :rows]), cache=cache)
        model.logits(hidden[0])
        cache.keep(context, [])

    seconds = quickest_of_each(one, SIZES)
    return [seconds[rows] for rows in SIZES]


def quickest_of_each(function, names, *arguments):
    """{name: seconds of the quickest call of ``function(name, *arguments)``} for all ``names``."""
    for name in names:  # the first call of each does not count
        function(name, *arguments)
    best = dict.fromkeys(names, inf)
    racing = list(names)
    for _ in range(ROUNDS):
        for name in racing:  # in turns: a slow moment is no fault of one of them
            began = time.perf_counter()
            function(name, *arguments)
            best[name] = min(best[name], time.perf_counter() - began)
        # What is far slower than another is not asked again.
        racing = [name for name in racing if best[name] < HOPELESS * min(best.values())]
    return best
