"""How many nodes of a growing tree are worth sending, by what the target's passes cost.

For exit 0 alone, whose nodes cost nothing to draft. A pass over more positions takes longer, so a
node pays if it is accepted often enough.
"""

from bisect import bisect_left
from dataclasses import astuple, dataclass
from itertools import accumulate

import torch

from ..decoder import Target
from ..model import Llama
from ..timing import time_calls, timed_once
from ..tree import GrowingShape, Shape, Tree, most_probable

SIZES = 1, 2, 4, 8, 16  # rows of the passes that are timed
CONTEXT = 400  # cached positions that they attend to
DTYPES = torch.float32, torch.bfloat16  # in which passes are timed
TRUST = 0.8  # factor for exit 0's probabilities, which are too high; tuned on SmolLM2-135M
MIN_PROB = 0.03  # a path that is less probable is not drafted, however cheap passes are
MAX_ROWS = 17  # positions per prompt up to which costs are known; trees chosen by them end at 16


@dataclass(frozen=True)
class PayingShape(GrowingShape):
    """A growing shape that sends the nodes that pay.

    ``costs``: seconds of a target pass over 1, 2, ... positions.
    """

    costs: tuple[float, ...]

    def nodes_to_send(self, tree: Tree) -> list[int]:
        nodes = super().nodes_to_send(tree)
        probs = sorted((tree.probs[node] for node in nodes), reverse=True)
        return most_probable(nodes, tree.probs, best_node_count(probs, self.costs))


def fit_shape(target: Target, shape: Shape, stop: float, batch: int) -> tuple[Shape, float]:
    """``shape`` and ``stop`` for exit 0 alone, as far as they depend on the costs of ``target``.

    These are measured once; if they are not known, nothing changes. ``batch`` prompts share a pass.
    """
    costs = pass_seconds(target, batch * MAX_ROWS) if isinstance(target, Llama) else None
    if costs is None:
        return shape, stop
    own = costs[batch - 1 :: batch]  # k rows of each prompt are k * batch rows of a pass
    stop = min(1.0, max(MIN_PROB, min_paying_prob(own)))
    if isinstance(shape, GrowingShape):
        shape = PayingShape(*astuple(shape), costs=tuple(own))
    return shape, stop


def best_node_count(probs: list[float], costs: list[float]) -> int:
    """The number of nodes with the most tokens per second.

    Args:
        probs: of the paths to the nodes, the most probable first.
        costs: seconds of a target pass over 1, 2, ... positions.

    A pass over N nodes and the position before them emits one token, and as many more as nodes are
    accepted: TRUST times the sum of their probabilities.

    >>> best_node_count([0.8, 0.5, 0.1], costs=[1.0, 1.2, 1.3, 1.5])
    2
    """
    tokens = accumulate((TRUST * prob for prob in probs), initial=1.0)
    rates = [emitted / seconds for emitted, seconds in zip(tokens, costs)]
    return max(range(len(rates)), key=lambda count: rates[count])


def min_paying_prob(costs: list[float]) -> float:
    """The probability of a path below which no node pays, however many there are.

    N nodes of probability P give N · TRUST · P more tokens in costs[N] / costs[0] of the time, so
    they pay if 1 + N · TRUST · P > costs[N] / costs[0].
    """
    return min((seconds / costs[0] - 1.0) / n for n, seconds in enumerate(costs[1:], 1)) / TRUST


def pass_seconds(model: Llama, rows: int) -> list[float] | None:
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
def time_passes(model: Llama) -> list[list[float]]:
    """Seconds of passes of ``model`` over each of SIZES rows, after CONTEXT cached positions."""
    cache = model.new_cache(CONTEXT + SIZES[-1])
    cache.advance(CONTEXT)

    def run(rows: int) -> None:
        hidden = model.embed(torch.zeros(1, rows, dtype=torch.long, device=model.device))
        mask = hidden.new_full((rows, CONTEXT + rows), -torch.inf).triu(CONTEXT + 1)
        model.logits(model.run_layers(hidden, mask=mask, cache=cache)[0])
        cache.keep(CONTEXT, [])

    return time_calls(run, SIZES)
