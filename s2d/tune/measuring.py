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
LEVELS, LENGTH = 3, 7  # of the trees that are measured, and of the chains
PATIENCE = 8.0  # seconds, if that is enough to see each case at either length


class Probe(Tuner):
    """A Tuner whose every draft is as long, wide and large as one of the ``cases`` says, though it works out all it would do.

    These are (levels, nodes drafted from at once, nodes sent), all from the exit of one number, so that nothing is to be caught up on;
    it ``looks`` at the others before it or not. The first step after a prompt of ``n`` tokens, which reads it, is none of them.
    """

    def __init__(self, exits, vocabulary, n, exit, cases, looks=False):
        super().__init__(flat_costs(1.0, 1.0, len(exits)), exits, None, vocabulary)
        self.n, self.exit, self.cases, self.looks = n, exit, cycle(cases), looks

    def start(self, n, sampling):
        super().start(n, sampling)
        self.case = next(self.cases) if n > self.n else (1, 1, 1)
        return True

    def skips(self, exit, *where):
        super().skips(exit, *where)
        return exit < self.exit and not self.looks

    def enough(self, exit, *said):
        super().enough(exit, *said)
        return exit == self.exit

    def width(self, sure):
        super().width(sure)
        return 1 if self.case[1] == 1 else WIDEST

    def prefers_drawn(self, drawn, likeliest):
        return True

    def worth(self, *candidates):
        known = len(self.every_path)
        super().worth(*candidates)
        del self.every_path[known:]
        if not self.drawn:
            self.every_path.append([1.0] * sum(map(len, self.levels[-1].tokens)))
        return True

    def expand(self):
        super().expand()
        levels, width, _ = self.case
        order = list(
            range(min(width, len(self.every_path[-1])) if len(self.levels) < levels else 0)
        )
        self.levels[-1].taken, self.paths = [0] * len(order), [1.0] * len(order)
        return order

    def send(self):
        order, plan = super().send()
        return order if self.drawn else list(
            range(min(self.case[2], sum(map(len, self.every_path))))
        ), plan


def measure(generate, target, draft, exits):
    """The Costs of decoding with ``target`` and ``draft``, from real steps of ``generate`` that draft in every size.

    Takes some seconds, and says so on stderr. Each number is a median, of steps that took turns.
    """
    print(
        f"measuring what passes cost ({describe(target, draft, exits)}), once",
        file=sys.stderr,
        flush=True,
    )
    largest = min(model.config.max_position_embeddings for model in (target, draft))
    contexts = [max(1, min(16, largest // 8)), max(2, min(768, largest // 2))]
    length = min(LENGTH, max(LEVELS, largest // 8))
    chains = [(1, 1, 0), (1, 1, 1), (length, 1, 2), (length, 1, 3)]
    cases = chains + [(LEVELS, max(width, next(w for w in WIDTHS if WIDEST + (LEVELS - 1) * w * WIDEST >= rows - 1)), rows - 1)
                      for rows, width in zip(ROWS[len(chains):], cycle(WIDTHS[1:]))]  # wide enough to have so many nodes  # fmt: skip
    ways = [
        (exit, exit, False, cases) for exit in range(len(exits))
    ]  # name, exit, whether it looks at others, cases
    ways += [("looks", len(exits) - 1, True, cases), ("drawn", 0, False, chains)]
    probes = [
        (n, way, Probe(exits, draft.draft_vocabulary, n, exit, cases, looks))
        for way, exit, looks, cases in ways
        for n in contexts
    ]
    times, few = defaultdict(list), len(cases) * len(probes)  # milliseconds, by what of
    generator, began, steps, rounds = torch.Generator().manual_seed(0), time.monotonic(), 0, 0
    while (
        steps < few or (time.monotonic() - began < PATIENCE and steps < 4 * few)
    ) and rounds < few:
        rounds += 1
        for n, way, probe in probes:  # in turns
            seen = []  # the first step of a generation reads the prompt
            tokens = torch.randint(target.config.vocab_size, (n,), generator=generator).tolist()
            generate(target, tokens, draft=draft, method="auto", exits=exits, tuner=probe, max_new_tokens=24,
                     temperature=float(way == "drawn"),
                     on_step=lambda step: seen.append((step, *probe.case)))  # noqa: B023 - used at once  # fmt: skip
            for step, levels, width, nodes in seen[1:]:
                if len(step.proposal.exits) < levels or len(step.proposal.tree) < nodes:
                    continue  # near the end of the context, or of few tokens to choose from
                steps += 1
                times["target", n, 1 + len(step.proposal.tree)].append(1000 * step.target_seconds)
                times["first" if levels == 1 else "draft", n, way, width].append(
                    1000 * step.draft_seconds
                )
                times["rest", way == "drawn"].append(
                    1000 * (step.seconds - step.draft_seconds - step.target_seconds)
                )
    middle = {what: statistics.median(each) for what, each in times.items()}

    def of(*what):
        """Those of the times that begin with ``what``, by size; where a size was never seen, as its neighbours."""
        known = {key[-1]: ms for key, ms in middle.items() if key[:-1] == what}
        if not known:
            raise ValueError(
                "the target ends its answers too soon to measure anything; give a table with --costs"
            )
        sizes = ROWS if what[0] == "target" else WIDTHS
        return np.interp(sizes, sorted(known), [known[size] for size in sorted(known)])

    first, drafts = (
        [np.stack([of(part, n, way) for way, *_ in ways]) for n in contexts]
        for part in ("first", "draft")
    )
    more = np.array(
        [(length if width == 1 else LEVELS) - 1 for width in WIDTHS]
    )  # levels that are not the first
    levels = [
        np.maximum(whole - one, 0.05 * one) / more for one, whole in zip(first, drafts)
    ]  # (E + 2, WIDTHS)
    found = [[of("target", n), *segments(of_way[:-1])] for n, of_way in zip(contexts, levels)]
    target_ms, *segments_ms, look = rising(rising(np.array(found), axis=0), axis=2).transpose(
        1, 0, 2
    )  # of (2, 1 + E + 1, ROWS)
    drawn = max(0.0, float(np.mean([of_way[-1, 0] - of_way[0, 0] for of_way in levels])))
    start = max(
        0.0, float(np.mean([one[:, 0] - of_way[:, 0] for one, of_way in zip(first, levels)]))
    )
    return Costs(describe(target, draft, exits), contexts, target_ms.tolist(), np.stack(segments_ms, axis=1).tolist(), look.tolist(),
                 drawn, start, [middle["rest", False], middle["rest", True]])  # fmt: skip


def rising(costs, axis):
    """What is nearest to ``costs`` and never falls along ``axis``: the mean of the closest such curves above and below."""
    above = np.maximum.accumulate(costs, axis)
    below = np.flip(np.minimum.accumulate(np.flip(costs, axis), axis), axis)
    return (above + below) / 2


def segments(levels):
    """Milliseconds (E + 1, WIDTHS) of a level -> (E + 1, ROWS), of each segment and of a look.

    There is one for each exit, of which alone was looked at, and one for the last where all were.
    """
    own = np.diff(
        np.maximum.accumulate(levels, axis=0), axis=0, prepend=0.0
    )  # of each segment alone, and of all looks but one
    own[-1] /= max(len(own) - 2, 1)
    own[0] = np.maximum(own[0] - own[-1], 0.0)
    slope = np.maximum(own[:, -1] - own[:, -2], 0.0) / (WIDTHS[-1] - WIDTHS[-2])
    return [np.where(np.array(ROWS) <= WIDTHS[-1], np.interp(ROWS, WIDTHS, each), each[-1] + (np.array(ROWS) - WIDTHS[-1]) * more).tolist()
            for each, more in zip(own, slope)]  # fmt: skip
