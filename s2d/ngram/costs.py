"""How many nodes of a growing tree are worth sending, by what the target's passes cost.

For exit 0 alone, whose nodes cost nothing to draft. A pass over more positions takes longer, so a
node pays if it is accepted often enough.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

import torch

from ..decoder import Target
from ..model import Llama
from ..timing import time_calls, timed_once
from ..tree import GrowingShape, Shape, Tree, top_nodes

SIZES = 1, 2, 4, 8, 16  # rows of the passes that are timed
CONTEXT = 400  # cached positions that they attend to
TIMED_DTYPES = torch.float32, torch.bfloat16
ROW_COST = 1 / 16  # of a pass over one row, where passes are not timed: a GPU's cost less
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
        return top_nodes(nodes, tree.probs, best_node_count(probs, self.costs))


def fit_shape(target: Target, shape: Shape, stop: float, batch: int) -> tuple[Shape, float]:
    """``shape`` and ``stop`` such that exit 0 drafts, and sends, only nodes that pay.

    A chain, and a shape of the caller's own, stay as they are. ``batch`` prompts share a pass.
    """
    # k rows of each prompt are k * batch rows of a pass.
    costs = pass_costs(target, range(batch, batch * MAX_ROWS + 1, batch))
    stop = min(1.0, max(MIN_PROB, min_paying_prob(costs)))
    if type(shape) is GrowingShape:
        shape = PayingShape(*astuple(shape), costs=tuple(costs))
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


def pass_costs(target: Target, all_rows: Sequence[int]) -> list[float]:
    """What passes of ``target`` over each of ``all_rows`` rows cost, in any unit.

    Passes over each of SIZES are timed if they can be (``can_time``). A number of rows between two
    of them costs as the larger; each row beyond them as much as the last ones. If nothing can be
    timed, each row adds ROW_COST.
    """
    if not can_time(target):
        return [1.0 + ROW_COST * (rows - 1) for rows in all_rows]
    weight = target.lm_head.weight
    layout = "packed" if weight.is_mkldnn else weight.stride()  # see speed/layout.py
    what = ["passes", type(target).__name__, target.config, target.dtype, layout]
    seconds = list(timed_once(what, SIZES, lambda: time_passes(target)).values())
    per_row = max(0.0, seconds[-1] - seconds[-2]) / (SIZES[-1] - SIZES[-2])
    costs = []
    for rows in all_rows:
        if rows <= SIZES[-1]:
            costs.append(seconds[bisect_left(SIZES, rows)])
        else:
            costs.append(seconds[-1] + per_row * (rows - SIZES[-1]))
    return costs


def can_time(target: Target) -> bool:
    """Whether to time passes of ``target``: on a CPU, as decoding there is done in TIMED_DTYPES."""
    if not isinstance(target, Llama) or target.device.type != "cpu":
        return False
    long_enough = target.config.max_position_embeddings >= CONTEXT + SIZES[-1]
    return target.dtype in TIMED_DTYPES and long_enough


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
