"""Measuring what the parts of a step cost, by real steps that draft in every size."""

import statistics
import sys
import time
from collections import defaultdict
from itertools import cycle

import numpy as np
import torch

from .costs import ROWS, WIDEST, Costs, describe, flat_costs
from .tuner import Tuner

WIDTHS = (1, 2, 4, 8)  # nodes drafted from at once
LEVELS = 3  # of the drafts that are measured
PATIENCE = 8.0  # seconds, if that is enough to see each case twice at either length


class Probe(Tuner):
    """A Tuner whose every draft is as wide and as large as one of the ``cases`` says, though it works out all it would do.

    These are (nodes drafted from at once, nodes sent), all from the exit of one number, so that nothing is to be caught up on.
    The first step after a prompt of ``n`` tokens, which reads it, is none of them.
    """

    def __init__(self, exits, vocabulary, n, exit, cases):
        super().__init__(flat_costs(1.0, 1.0, len(exits)), exits, None, vocabulary)
        self.n, self.exit, self.cases = n, exit, cycle(cases)

    def start(self, n, sampling):
        super().start(n, sampling)
        self.case = next(self.cases) if n > self.n else (1, 1)
        return True

    def enough(self, exit, *said):
        super().enough(exit, *said)
        return exit == self.exit

    def width(self, sure):
        super().width(sure)
        return WIDEST

    def worth(self, tokens, probs):
        known = len(self.every_path)
        super().worth(tokens, probs)
        del self.every_path[known:]
        self.every_path.append([1.0] * sum(map(len, tokens)))
        return True

    def expand(self):
        super().expand()
        order = list(range(min(self.case[0], len(self.every_path[-1])) if len(self.levels) < LEVELS else 0))
        self.levels[-1].taken, self.paths = [0] * len(order), [1.0] * len(order)
        return order

    def send(self):
        order, plan = super().send()
        return list(range(min(self.case[1], sum(map(len, self.every_path))))), plan


def measure(generate, target, draft, exits):
    """The Costs of decoding with ``target`` and ``draft``, from real steps of ``generate`` that draft in every size.

    Takes some seconds, and says so on stderr. Each number is a median, of steps that took turns.
    """
    print(f"measuring what passes cost ({describe(target, draft, exits)}), once", file=sys.stderr, flush=True)
    largest = min(model.config.max_position_embeddings for model in (target, draft))
    contexts = [max(1, min(16, largest // 8)), max(2, min(768, largest // 2))]
    cases = [(max(width, next(w for w in WIDTHS if WIDEST + (LEVELS - 1) * w * WIDEST >= rows - 1)), rows - 1)
             for rows, width in zip(ROWS, cycle(WIDTHS))]  # each as wide as it must be to have so many nodes  # fmt: skip
    probes = [(n, exit, Probe(exits, draft.draft_vocabulary, n, exit, cases)) for exit in range(len(exits)) for n in contexts]
    times, few = defaultdict(list), 2 * len(cases) * len(probes)  # milliseconds, by what of
    generator, began, steps, rounds = torch.Generator().manual_seed(0), time.monotonic(), 0, 0
    while (steps < few or (time.monotonic() - began < PATIENCE and steps < 2 * few)) and rounds < few:
        rounds += 1
        for n, exit, probe in probes:  # in turns
            seen = []  # the first step of a generation reads the prompt
            tokens = torch.randint(target.config.vocab_size, (n,), generator=generator).tolist()
            generate(target, tokens, draft=draft, method="auto", exits=exits, tuner=probe, max_new_tokens=24,
                     on_step=lambda step: seen.append((step, *probe.case)))  # noqa: B023 - used at once  # fmt: skip
            steps += len(seen[1:])
            for step, width, nodes in seen[1:]:
                if len(step.proposal.exits) < LEVELS or len(step.proposal.tree) < nodes:
                    continue  # near the end of the context, or of few tokens to choose from
                times["target", n, 1 + nodes].append(1000 * step.target_seconds)
                times["draft", n, exit, width].append(1000 * step.draft_seconds)
                times["rest"].append(1000 * (step.seconds - step.draft_seconds - step.target_seconds))
    middle = {what: statistics.median(each) for what, each in times.items()}

    def of(*what):
        """Those of the times that begin with ``what``, by size; where a size was never seen, as its neighbours."""
        known = {key[-1]: ms for key, ms in middle.items() if key[:-1] == what}
        if not known:
            raise ValueError("the target ends its answers too soon to measure anything; give a table with --costs")
        sizes = ROWS if what[0] == "target" else WIDTHS
        return np.interp(sizes, sorted(known), [known[size] for size in sorted(known)])

    found = [[of("target", n), *segments(np.stack([of("draft", n, exit) for exit in range(len(exits))]))] for n in contexts]
    target_ms, *segments_ms = rising(rising(np.array(found), axis=0), axis=2).transpose(1, 0, 2)  # of (2, 1 + E, ROWS)
    return Costs(describe(target, draft, exits), contexts, target_ms.tolist(), np.stack(segments_ms, axis=1).tolist(), middle["rest"])


def rising(costs, axis):
    """What is nearest to ``costs`` and never falls along ``axis``: the mean of the closest such curves above and below."""
    above = np.maximum.accumulate(costs, axis)
    below = np.flip(np.minimum.accumulate(np.flip(costs, axis), axis), axis)
    return (above + below) / 2


def segments(drafts):
    """Milliseconds (E, WIDTHS) of drafts of LEVELS levels, the first of one place, -> (E, ROWS) of segments."""
    one = drafts[:, :1] / LEVELS
    levels = np.maximum(one, (drafts - one) / (LEVELS - 1))  # (E, WIDTHS)
    levels = np.maximum.accumulate(levels, axis=0)
    own = np.diff(levels, axis=0, prepend=0.0)  # of each segment alone
    slope = np.maximum(own[:, -1] - own[:, -2], 0.0) / (WIDTHS[-1] - WIDTHS[-2])
    return [np.where(np.array(ROWS) <= WIDTHS[-1], np.interp(ROWS, WIDTHS, each), each[-1] + (np.array(ROWS) - WIDTHS[-1]) * more).tolist()
            for each, more in zip(own, slope)]  # fmt: skip


