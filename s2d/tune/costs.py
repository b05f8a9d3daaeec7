"""What a pass costs, in milliseconds: the table that drafting is tuned by, and where it is kept."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from ..files import staged_file

WIDEST, DEEPEST, LARGEST = (
    8,
    16,
    64,
)  # children of a node and nodes drafted from at once; levels; nodes sent
ROWS = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    9,
    12,
    16,
    17,
    24,
    32,
    48,
    65,
)  # whose costs are measured: both ends of the stairs there are


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a step at two context lengths, between and beyond which they are taken as a line.

    ``target`` (2, ROWS) of a pass over so many rows, ``segments`` (2, E, ROWS) of a draft's segment, all else a level takes
    included in the first, and ``look`` (2, ROWS) of what an exit says of so many places, its head above all. Then ``drawn`` of
    drawing a level's token, ``start`` of beginning a draft, and ``step`` (2,) of everything else in a step, at T = 0 and above.
    ``made_for`` says what was measured.
    """

    made_for: str
    contexts: list
    target: list
    segments: list
    look: list
    drawn: float
    start: float
    step: list

    def at(self, n):
        """(target (R,), segments (E, R), look (R,)) at n tokens of context, for 0, 1, 2, ... LARGEST + 1 rows."""
        low, high = self.contexts
        share, wanted = (n - low) / (high - low), np.arange(LARGEST + 2)

        def line(short, long):
            short, long = np.interp(wanted, ROWS, short), np.interp(wanted, ROWS, long)
            return np.maximum(short + share * (long - short), 0.2 * np.minimum(short, long))

        return (
            line(*self.target),
            np.stack([line(*costs) for costs in zip(*self.segments)]),
            line(*self.look),
        )


def flat_costs(target, segment, exits, look=0.0, step=0.0):
    """Costs of a machine to which rows do not matter: ``target`` ms for a pass, ``segment`` ms for each of the draft's ..."""
    target, segment, look = ([ms] * len(ROWS) for ms in (target, segment, look))
    return Costs(
        "", [0, LARGEST], [target] * 2, [[segment] * exits] * 2, [look] * 2, 0.0, 0.0, [step, step]
    )


def cheapest_growth(costs):
    """Costs (N,) of 0, 1, ... rows -> (N,): what each further row adds, at best, if some more of them are added.

    Costs are stairs, as wide as a processor's tiles or a compiled size; who looks one row ahead never takes the next.
    """
    here = np.arange(len(costs))[:, None]
    there = np.minimum(here + np.arange(1, WIDEST + 1), len(costs) - 1)  # (N, WIDEST)
    growth = (costs[there] - costs[here]) / np.maximum(there - here, 1)
    return np.maximum(growth.min(axis=1), 0.0)


def describe(target, draft, exits):
    """What costs depend on, in words: shapes, dtype, mode, device, threads, torch."""

    def shape(model):
        c = model.config
        head = c.vocab_size if model.draft_vocabulary is None else len(model.draft_vocabulary)
        return f"{c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size}-{c.num_key_value_heads}-{head}"

    device = (
        torch.cuda.get_device_name(target.device)
        if target.device.type == "cuda"
        else f"{platform.machine()} {platform.node()}"
    )
    mode = "compiled" if type(target).__name__ == "StaticLlama" else "eager"
    exits = ".".join(map(str, exits))
    return (f"{shape(target)} by {shape(draft)} exits {exits}, {str(target.dtype).removeprefix('torch.')}, {mode}, {device}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}")  # fmt: skip


def read_costs(file, exits):
    """The Costs in ``file``, for that many ``exits``; FileNotFoundError where there is none, ValueError where it holds none."""
    try:
        costs = Costs(**json.loads(Path(file).read_text(encoding="utf-8")))
        contexts, target, segments, look, rest = (np.array(part, dtype=float) for part in (
            costs.contexts, costs.target, costs.segments, costs.look, [costs.drawn, costs.start, *costs.step]))  # fmt: skip
        good = (isinstance(costs.made_for, str) and contexts.shape == (2,) and target.shape == look.shape == (2, len(ROWS))
                and segments.ndim == 3 and segments.shape[::2] == (2, len(ROWS)) and rest.shape == (4,)
                and 0 <= contexts[0] < contexts[1] < 2**40 and 0 < target.min()
                and all(0 <= part.min() <= part.max() < 1e12 for part in (target, segments, look, rest)))  # fmt: skip
    except (TypeError, ValueError, OverflowError, RecursionError):
        good = False
    if not good:
        raise ValueError(
            f"{file} holds no table of costs; name another file, or one that is yet to be written"
        )
    if segments.shape[1] != exits:
        raise ValueError(
            f"{file} holds the costs of {segments.shape[1]} exits, not of {exits}; name another file"
        )
    return costs


def kept_costs(made_for, exits):
    """The Costs that were kept for just this; None where there are none, or where they cannot be read."""
    try:
        costs = read_costs(own_file(made_for), exits)
    except (OSError, ValueError, RuntimeError):
        return None
    return costs if costs.made_for == made_for else None


def own_file(made_for):
    """Where a table is kept: in the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "s2d" / f"costs-{sha256(made_for.encode()).hexdigest()[:16]}.json"


def write_costs(costs, file):
    with staged_file(Path(file)) as stage:
        stage.write_text(json.dumps(asdict(costs)) + "\n", encoding="utf-8")
