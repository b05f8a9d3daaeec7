"""Drafting that tunes itself: how deep, how long and how wide to draft, by what a millisecond buys.

Over many steps the speed of decoding is E[tokens of a step] / E[milliseconds of a step] (renewal-reward). With ``rate``, the
tokens a millisecond buys at present, an action is worth it exactly when the tokens it is expected to add exceed ``rate``
times the milliseconds it takes. That one rule decides everything here: whether a place goes on to a deeper exit, whether
another level is drafted and from how many nodes, whether a token is drawn at all, and which candidates the target checks.
Milliseconds come from a table (``Costs``), chances of acceptance from counting (``Chances``); the clock decides nothing, so
the same seed, table and history give the same text.

Lemma (exactness). Whatever is decided about a place is decided from the draft's distributions, from tokens drawn before it
and from earlier steps, all of which are given when its token is drawn; and a drawn token is always sent. Conditioned on
what was given, the token is still drawn from q, or not drawn at all, and the verifier's theorem (verify.py) holds for either
case; averaging over what was given keeps p. Likeliest candidates are no random choice: any set of them may be sent, as long
as nothing is known of the target's own draw. What is learnt from a step serves later steps only.

To read: costs.py and chances.py, the two tables; tuner.py, the decisions; tree.py, what they make of a draft; measuring.py, how a
table is measured. A tuner that is given to ``generate`` again goes on from what it has learnt:

    tuner = tuner_for(generate, target, draft, draft.config.exit_layers)
    for tokens in prompts:
        output = generate(target, tokens, draft=draft, method="auto", tuner=tuner)
"""

import sys
from pathlib import Path

import numpy as np

from ..decision import fingerprint
from .chances import BINS, Chances
from .costs import describe, kept_costs, own_file, read_costs, write_costs
from .measuring import measure
from .tuner import Tuner


def tuner_for(generate, target, draft, exits, file=None):
    """A Tuner for this pair, with the chances that came with the draft and costs as measured on this machine.

    Costs are those in ``file``, whatever they were measured for; without one, or where there is none yet, they are measured by
    steps of ``generate`` and kept, there or in the user's cache directory. Raises ValueError for a file that holds none.
    """
    if file and Path(file).exists():
        costs = read_costs(file, len(exits))
    elif file:
        costs = measure(generate, target, draft, exits)
        write_costs(costs, file)
    else:
        costs = costs_of_this_machine(generate, target, draft, exits)
    return Tuner(costs, exits, read_priors(draft, target, exits), draft.draft_vocabulary)


def costs_of_this_machine(generate, target, draft, exits):
    """The Costs in the user's cache directory, measured and kept there if there are none; where that cannot be, just measured."""
    made_for = describe(target, draft, exits)
    costs = kept_costs(made_for, len(exits))
    if costs is None:
        costs = measure(generate, target, draft, exits)
        try:
            write_costs(costs, own_file(made_for))
        except (OSError, RuntimeError) as error:
            print(
                f"the table of costs could not be kept, so it will be measured again: {error}",
                file=sys.stderr,
            )
    return costs


def read_priors(draft, target, exits):
    """{"greedy" or "sampled": (weights, chances)} that came with the draft for this target; none where exits are left out."""
    known = (
        draft.chances.get(fingerprint(target), {})
        if tuple(exits) == draft.config.exit_layers
        else {}
    )
    try:
        priors = {kind: np.array(known[kind], dtype=float) for kind in known}
        shape = 2, len(Chances(len(exits)).table), BINS
        good = all(
            prior.shape == shape
            and (prior[0] >= 1).all()
            and (prior[1] == prior[1].clip(0, 1)).all()
            for prior in priors.values()
        )
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ValueError(
            f"the draft's counted chances (chances.json) do not fit its {len(exits)} exits; count them again"
        )
    return {kind: prior.tolist() for kind, prior in priors.items()}
