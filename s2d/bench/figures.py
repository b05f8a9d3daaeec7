"""Records of answers, and what is measured of them: figures with their spread over questions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..options import Options
from ..stats import Generation, Stats

RESAMPLES = 1000
# question_id, category, group, and turns: texts, or lists of ids that are whole prompts.
Question = dict[str, Any]
# Where two answers part: the seed, the ids before, and the token with which each goes on.
Difference = tuple[int, list[int], tuple[int, int]]


class Turn(NamedTuple):
    prompt: list[int]
    tokens: list[int]  # of the answer
    seconds: float  # of the whole call
    generation: Generation | None  # transformers has none


class Record(NamedTuple):
    """How a method answered a question in a round."""

    round: int
    method: str
    seed: int  # of each of the turns
    question: Question
    turns: list[Turn]

    def first_difference(self, other: "Record") -> Difference | None:
        for own, theirs in zip(self.turns, other.turns):
            for place, tokens in enumerate(zip(own.tokens, theirs.tokens)):
                if tokens[0] != tokens[1]:
                    return self.seed, own.prompt + own.tokens[:place], tokens
        return None


@dataclass(frozen=True)
class Figure:
    """A number that was measured, and its standard error. As text it is ``2.12 ±0.04``.

    The error is that of a bootstrap: questions are drawn anew, and the number is computed again.
    Each sample has the same questions for all methods. A question brings all of its rounds.
    """

    samples: Tensor  # (S,): the first one is of all questions, each once
    groups: Sequence[str]  # of all questions, as they are drawn

    @property
    def value(self) -> float:
        return self.samples[0].item()

    @property
    def spread(self) -> float | None:
        """The standard error; None for less than four degrees of freedom, as of four questions.

        An error that is estimated from few questions is uncertain: (value - truth) / error follows
        Student's t. So the error is multiplied by the standard deviation of Student's t.
        """
        freedom = len(self.groups) - len({*self.groups})
        if freedom < 4:
            return None
        return self.samples[1:].std().item() * sqrt(freedom / (freedom - 2))

    def __format__(self, form: str) -> str:
        spread = "" if self.spread is None else f" ±{self.spread:{form}}"
        return f"{self.value:{form}}{spread}"


Column = dict[str, dict[str, Figure]]  # {row: {measure: what was measured}}


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.method, []).append(record)
    return found


def stats_of(records: Iterable[Record]) -> Stats:
    """The steps of all answers. Those of transformers have none."""
    made = [turn.generation for record in records for turn in record.turns if turn.generation]
    total = Stats(exits=[])
    for stats in (generation.stats for generation in made):
        total.exits = stats.exits
        for name in ("accept_lengths", "draft_levels", "sent", "levels", "accepted"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
    return total


def make_column(records: Sequence[Record], options: dict[str, Options]) -> Column:
    """What is measured of each method; ``options`` are of our methods.

    The measures:
        speedup: tokens per second divided by those of "ar" in a round, the median of rounds.
        mat: tokens emitted per step. transformers has no steps.
        accepted: accepted tokens per drafted level.
        needs: the tokens per step with which a method would be as fast as "ar".
        of best exit: of ``s2d``, its speedup divided by that of the fastest single exit (``sd``).
    """
    rows = by_method(records)
    groups = [r.question["group"] for r in rows["ar"] if r.round == records[0].round]
    times = draw_questions(groups)
    figure = partial(Figure, groups=groups)
    totals = {method: count_questions(own) @ times.T for method, own in rows.items()}
    speed_alone = totals["ar"][0] / totals["ar"][1]  # (R, S)
    column: Column = {}
    for method, (tokens, seconds, steps, levels, accepted) in totals.items():
        speedup = (tokens / seconds / speed_alone).quantile(0.5, dim=0)  # (S,)
        cell = column[method] = {"speedup": figure(speedup)}
        if steps.any():
            mat = tokens.sum(dim=0) / steps.sum(dim=0)
            cell["mat"] = figure(mat)
            cell["accepted"] = figure(accepted.sum(dim=0) / levels.sum(dim=0).clamp(min=1))
            cell["needs"] = figure(mat / speedup)
    single = [column[name]["speedup"].samples for name in options if options[name].method == "sd"]
    for method in options:
        if single and options[method].method == "s2d":
            speedup = column[method]["speedup"].samples
            column[method]["of best exit"] = figure(speedup / torch.stack(single).amax(dim=0))
    return column


def count_questions(records: Sequence[Record]) -> Tensor:
    """(5, R, Q): tokens, seconds, steps, levels and accepted tokens, by round and question.

    The ``records`` of a method go by rounds, then by questions.
    """
    counts = []
    for record in records:
        tokens = sum(len(turn.tokens) for turn in record.turns)
        seconds = sum(turn.seconds for turn in record.turns)
        stats = stats_of([record])
        counts.append([tokens, seconds, stats.steps, stats.draft_levels, stats.accepted.total()])
    rounds = len({record.round for record in records})
    return torch.tensor(counts, dtype=torch.float64).T.view(5, rounds, -1)


def draw_questions(groups: Sequence[str]) -> Tensor:
    """(S, Q): how many times each sample counts each question.

    Questions are drawn with replacement and within their ``groups``, as they were taken. Of n
    questions n - 1 are drawn, and count n / (n - 1) times: drawing n of them would make the error
    too small, by the root of (n - 1) / n (Rao and Wu, 1988).
    """
    generator = np.random.default_rng(0)
    times = torch.ones(1 + RESAMPLES, len(groups), dtype=torch.float64)
    for group in dict.fromkeys(groups):
        inside = [place for place, each in enumerate(groups) if each == group]
        size = len(inside)
        count = max(1, size - 1)  # a single question is always drawn
        drawn = generator.multinomial(count, [1 / size] * size, RESAMPLES)
        times[1:, inside] = torch.from_numpy(drawn * (size / count))
    return times


def mean_column(columns: Sequence[Column]) -> Column:
    """Means over ``columns``, of the rows that all of them have."""
    means: Column = {}
    for row, cell in columns[0].items():
        if all(row in column for column in columns):
            for measure in cell:
                samples = sum(column[row][measure].samples for column in columns) / len(columns)
                means.setdefault(row, {})[measure] = Figure(samples, cell[measure].groups)
    return means
