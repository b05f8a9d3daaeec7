"""How many nodes of a growing tree are worth sending, by what the target's passes cost here."""

from functools import partial
from itertools import accumulate

TRUST = 0.8  # of what exit 0 says of its paths; tuned on text that SmolLM2-135M sampled
MIN_PROB = 0.03  # of a path that exit 0 follows, however cheap rows are
MAX_ROWS = 17  # of a pass over one prompt and its tree whose cost is asked for


def options_for(costs: list[float] | None, batch: int = 1) -> dict:
    """Options of ``generate`` for exit 0 alone: ``nodes_to_send`` and ``stop``.

    ``costs``: seconds of a target pass over 1, 2, ... rows (fast/costs.py). Of ``batch`` prompts
    that share a pass, all are taken to send as many nodes.
    """
    if costs is None:  # not known here
        return {}
    costs = costs[batch - 1 :: batch]
    stop = max(MIN_PROB, min_paying_prob(costs))
    return {"nodes_to_send": partial(node_count, costs=costs), "stop": min(stop, 1.0)}


def node_count(probs: list[float], costs: list[float]) -> int:
    """The number of nodes with the most tokens per second.

    ``probs``: of the paths to the nodes, the most probable first. A pass over N nodes and the
    position before them emits one token, and as many more as nodes are accepted: the sum of their
    probabilities, if the draft were not a little too sure.

    >>> node_count([0.8, 0.5, 0.1], costs=[1.0, 1.2, 1.3, 1.5])
    2
    """
    tokens = accumulate((TRUST * prob for prob in probs), initial=1.0)
    rates = [count / seconds for count, seconds in zip(tokens, costs)]
    return max(range(len(rates)), key=rates.__getitem__)


def min_paying_prob(costs: list[float]) -> float:
    """The probability of a path below which no node pays, however many there are."""
    return min((seconds / costs[0] - 1.0) / n for n, seconds in enumerate(costs[1:], 1)) / TRUST
