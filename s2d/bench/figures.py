"""Records of answers, and what is measured of them: figures with their spread over questions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import Options
from ..stats import Generation, Stats

RESAMPLES = 1000
# question_id, category, group, and turns: texts, or lists of ids that are whole prompts.
Question = dict[str, Any]


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


@dataclass(frozen=True)
class Figure:
    """A number that was measured, and its standard error. As text it is ``2.12 ±0.04``.

    The error is that of a bootstrap: questions and rounds are drawn anew, with replacement, and the
    number is computed again. Each sample has the same questions and rounds for all methods.
    """

    samples: Tensor  # (S,): the first one is of all questions and rounds, each once

    @property
    def value(self) -> float:
        return self.samples[0].item()

    @property
    def spread(self) -> float | None:
        """The standard error; None if there was only one question."""
        return self.samples[1:].std().item() if len(self.samples) > 1 else None

    def __format__(self, form: str) -> str:
        spread = "" if self.spread is None else f" ±{self.spread:{form}}"
        return f"{self.value:{form}}{spread}"


Column = dict[str, dict[str, Figure]]  # {row: {measure: what was measured}}


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.method, []).append(record)
    return found


def stats_of(records: Iterable[Record]) -> list[Stats]:
    """The Stats of all answers of our methods."""
    made = [turn.generation for record in records for turn in record.turns]
    return [each.stats for each in made if each is not None]


def make_column(records: Sequence[Record], options: dict[str, Options]) -> Column:
    """What is measured of each method; ``options`` are of our methods.

    The measures:
        speedup: tokens per second divided by those of "ar" in a round, the median of rounds.
        mat: tokens emitted per step. transformers has no steps.
        accepted: accepted tokens per drafted level.
        needs: the tokens per step with which a method would be as fast as "ar".
        of best exit, of worst exit: of ``s2d``, its speedup divided by that of the fastest and of
            the slowest single exit (``sd``) of the column, which are chosen afterwards.
    """
    totals = {method: resample(own) for method, own in by_method(records).items()}
    speed_alone = totals["ar"][0] / totals["ar"][1]  # (R, S)
    column: Column = {}
    for method, (tokens, seconds, steps, levels, accepted) in totals.items():
        speedup = (tokens / seconds / speed_alone).quantile(0.5, dim=0)  # (S,)
        cell = column[method] = {"speedup": Figure(speedup)}
        if steps.any():
            mat = tokens.sum(dim=0) / steps.sum(dim=0)
            cell["mat"] = Figure(mat)
            cell["accepted"] = Figure(accepted.sum(dim=0) / levels.sum(dim=0).clamp(min=1))
            cell["needs"] = Figure(mat / speedup)
    single = [column[name]["speedup"].samples for name in options if options[name].method == "sd"]
    for method in options:
        if single and options[method].method == "s2d":
            speedup = column[method]["speedup"].samples
            column[method]["of best exit"] = Figure(speedup / torch.stack(single).amax(dim=0))
            column[method]["of worst exit"] = Figure(speedup / torch.stack(single).amin(dim=0))
    return column


def resample(records: Sequence[Record]) -> Tensor:
    """(5, R, S): tokens, seconds, steps, levels and accepted tokens in each of R drawn rounds.

    They are sums over the questions that each of S samples draws. ``records`` go by rounds, then by
    questions. The draws depend on how many there are of both, and are the same for all methods.
    """
    counts = []
    for record in records:
        tokens = sum(len(turn.tokens) for turn in record.turns)
        counts.append([tokens, sum(turn.seconds for turn in record.turns), 0, 0, 0])
        for stats in stats_of([record]):
            counts[-1][2] += stats.steps
            counts[-1][3] += stats.draft_levels
            counts[-1][4] += stats.accepted_tokens
    rounds = len({record.round for record in records})
    by_question = torch.tensor(counts, dtype=torch.float64).T.view(5, rounds, -1)  # (5, R, Q)
    questions = by_question.shape[2]
    count = RESAMPLES if questions > 1 else 0
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(questions, (count, questions), generator=generator)
    drawn = torch.cat((torch.arange(questions)[None], drawn))  # (S, Q)
    picked = torch.randint(rounds, (count, rounds), generator=generator)
    picked = torch.cat((torch.arange(rounds)[None], picked))  # (S, R)
    times = torch.zeros(drawn.shape, dtype=torch.float64)  # that a question was drawn
    times.scatter_add_(1, drawn, torch.ones_like(times))
    by_round = by_question @ times.T  # (5, R, S)
    return by_round.gather(1, picked.T.expand(5, -1, -1))


def mean_column(columns: Sequence[Column]) -> Column:
    """Means over ``columns``, of the rows that all of them have."""
    means: Column = {}
    for row, cell in columns[0].items():
        if all(row in column for column in columns):
            for measure in cell:
                total = sum(column[row][measure].samples for column in columns)
                means.setdefault(row, {})[measure] = Figure(total / len(columns))
    return means
