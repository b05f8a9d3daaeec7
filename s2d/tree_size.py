"""How many nodes of a growing tree are worth sending, by what the target's passes cost.

For exit 0 alone, whose nodes cost nothing to draft. A pass over more positions takes longer, so a
node pays if it is accepted often enough. ``Options.resolved`` takes its ``stop`` from
``min_paying_prob`` and its ``node_count`` from ``best_node_count``.
"""

from itertools import accumulate

TRUST = 0.8  # factor for exit 0's probabilities, which are too high; tuned on SmolLM2-135M
MIN_PROB = 0.03  # a path that is less probable is not drafted, however cheap passes are
MAX_ROWS = 17  # positions per prompt up to which costs are known; trees chosen by them end at 16


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
