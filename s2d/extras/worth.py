"""What is worth sending to the target, by what its passes cost on this machine.

Knows nothing about how costs are measured (costs.py).
"""

from dataclasses import replace
from itertools import accumulate

from .products import lay_out, row_costs

TRUST = 0.8  # of what a draft says of its paths: so measured on sampled text


def prepared(plan, target, draft, batch):
    """``plan`` for these models, whose weights are laid out for passes of several rows.

    Where nothing was said of how much exit 0 drafts, the costs of the target's passes decide it:
    those of ``batch`` prompts at once, all of which draft alike.
    """
    for model in (target, draft) if plan.exits[-1] > 0 else (target,):
        lay_out(model)
    options = plan.options
    said = plan.exits != (0,) or options.stop is not None or options.init != "draft"
    said = said or not plan.coupled  # then the text would depend on what is sent
    costs = () if said else row_costs(target) or ()
    costs = tuple(costs[batch - 1 :: batch][: plan.shape.size + 1])  # with the others' rows
    if len(costs) < 2:
        return plan
    return replace(plan, stop=max(plan.stop, worth_a_row(costs)), costs=costs)


def most_tokens_a_second(probs, costs):
    """How many nodes to send of some whose paths have ``probs``, the most probable first.

    ``costs``: seconds of a pass over 1, 2, ... rows. A pass over N nodes and the position before
    them emits one token, and as many more as nodes are accepted: the sum of their ``probs``, were
    the draft not a little too sure.

    >>> most_tokens_a_second([0.8, 0.5, 0.1], [1.0, 1.2, 1.3, 1.5])
    2
    """
    tokens = accumulate((TRUST * prob for prob in probs), initial=1.0)
    rates = [count / seconds for count, seconds in zip(tokens, costs)]
    return max(range(len(rates)), key=rates.__getitem__)


def worth_a_row(costs):
    """The probability of a path under which no drafted token pays, however many there are of it.

    >>> round(worth_a_row([1.0, 1.4, 1.4]), 2)  # were it not a little too sure: 0.2
    0.25
    """
    return min((seconds / costs[0] - 1.0) / n for n, seconds in enumerate(costs[1:], 1)) / TRUST
