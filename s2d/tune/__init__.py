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

Knows nothing about models: it is told what they said and what they cost.
"""

import sys

import numpy as np

from ..decision import fingerprint
from .chances import BINS, Chances
from .costs import describe, known_costs, own_file, write_costs
from .measuring import measure
from .tuner import Tuner


def tuner_for(generate, target, draft, exits, file=None):
    """A Tuner for this pair, with the chances that came with the draft and costs as measured on this machine.

    Costs are those in ``file``, whatever they were measured for; without one, or where there is none yet, they are measured by
    steps of ``generate`` and kept, there or in the user's cache directory. Raises ValueError for a file that holds none.
    """
    made_for = describe(target, draft, exits)
    costs = known_costs(file or own_file(made_for), None if file else made_for)
    if costs is None:
        costs = measure(generate, target, draft, exits)
        try:
            write_costs(costs, file or own_file(made_for))
        except OSError as error:
            if file:
                raise
            print(f"the table of costs could not be kept, so it will be measured again: {error}", file=sys.stderr)
    if len(costs.segments[0]) != len(exits):
        raise ValueError(f"{file} holds the costs of {len(costs.segments[0])} exits, not of {len(exits)}; name another file")
    return Tuner(costs, exits, read_priors(draft, target, exits), draft.draft_vocabulary)


def read_priors(draft, target, exits):
    """{"greedy" or "sampled": (weights, chances)} that came with the draft for this target; none where exits are left out."""
    known = draft.chances.get(fingerprint(target), {}) if tuple(exits) == draft.config.exit_layers else {}
    try:
        priors = {kind: np.array(known[kind], dtype=float) for kind in known}
        shape = 2, len(Chances(len(exits)).table), BINS
        good = all(prior.shape == shape and (prior[0] >= 1).all() and (prior[1] == prior[1].clip(0, 1)).all() for prior in priors.values())
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"the draft's counted chances (chances.json) do not fit its {len(exits)} exits; count them again")
    return {kind: prior.tolist() for kind, prior in priors.items()}
