"""Records of answers, and from them tables, a picture and JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from ..checkpoint.files import staged
from ..options import Plan
from ..stats import Generation, Stats

# question_id, category, group, and turns: a list of texts; in ``compare`` the ids of a prompt.
Question = dict[str, Any]
Cell = dict[str, float]  # {measure: value}
Column = dict[str, Cell]  # {row: cell}
MEASURES = "speedup", "mat", "of best exit"
LEGEND = "speedup / mean accepted tokens / times the speed of the best single exit"


class Turn(NamedTuple):
    prompt: list[int]
    tokens: list[int]  # of the answer
    seconds: float  # of the whole call
    generation: Generation | None


class Record(NamedTuple):
    """How a method answered a question in a round."""

    round: int
    method: str
    question: Question
    turns: list[Turn]


@dataclass(frozen=True)
class Comparison:
    """What methods did in all rounds, on one target at one temperature. Printed, it is tables."""

    title: str
    records: list[Record]

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """{method of ours: its plan}."""
        made = {record.method: record.turns[0].generation for record in self.records}
        return {method: each.plan for method, each in made.items() if each is not None}

    @cached_property
    def by_group(self) -> dict[str, Column]:
        """Columns are the groups of tasks and "overall", and rows are the methods.

        A cell has these measures:
            speedup: tokens per second divided by those of "ar" in a round, the median of rounds.
            mat: tokens emitted per step. transformers has no steps.
            accepted: accepted tokens per drafted level.
            needs: the tokens per step with which a method would be as fast as "ar".
            of best exit: in the rows of ``s2d``, its speedup divided by that of the fastest single
                exit (``sd``) of the column. That exit is chosen afterwards, from the same rounds.
        """
        columns = {}
        groups = dict.fromkeys(record.question["group"] for record in self.records)
        for group in (*groups, "overall"):
            inside = []
            for record in self.records:
                if group in (record.question["group"], "overall"):
                    inside.append(record)
            rows = by_method(inside)
            columns[group] = {name: make_cell(own, rows["ar"]) for name, own in rows.items()}
            self.add_ratios(columns[group])
        return columns

    def add_ratios(self, column: Column) -> None:
        """Add the measure "of best exit"."""
        methods = {name: plan.method for name, plan in self.plans.items()}
        single = [column[name]["speedup"] for name in methods if methods[name] == "sd"]
        for name in methods:
            if single and methods[name] == "s2d":
                column[name]["of best exit"] = column[name]["speedup"] / max(single)

    @cached_property
    def acceptance(self) -> dict[str, dict[str, Any]]:
        """{method that drafts: what was accepted}, see ``Stats.acceptance``."""
        rows = by_method(self.records)
        found = {}
        for method, plan in self.plans.items():
            if plan.exits:  # not "ar"
                found[method] = add_up(rows[method]).acceptance(plan.exits)
        return found

    def different_from(self, expected: str) -> dict[str, int]:
        """{lossless method: how many of its answers differ from those of the ``expected`` one}.

        Rejection sampling is left out above T = 0, as it draws another text than others, and so are
        roots as published.
        """
        rows = by_method(self.records)
        found = {}
        for method, plan in self.plans.items():
            draws_anew = plan.options.rule != "noise" and plan.options.temperature > 0
            is_exact = rows[method][0].turns[0].generation.exact
            if method != expected and is_exact and not draws_anew:
                pairs = zip(rows[expected], rows[method])
                found[method] = sum(texts_of(one) != texts_of(other) for one, other in pairs)
        return found

    def __str__(self) -> str:
        text = table(f"{self.title}: {LEGEND}", self.by_group, MEASURES)
        if self.acceptance:
            text += f"\n{render(acceptance_table(self.acceptance))}\n"
        return text

    def as_json(self) -> dict[str, Any]:
        """What is printed, the options of the methods, and each answer of each round."""
        answers = []
        for record in self.records:
            turns = []
            for turn in record.turns:
                stats = turn.generation and vars(turn.generation.stats)
                turns.append(turn._asdict() | {"generation": stats})
            answers.append(record._asdict() | {"turns": turns})
        options = {method: each.as_dict() for method, each in self.plans.items()}
        tables = {"by_group": self.by_group, "acceptance": self.acceptance}
        return {"title": self.title, "options": options, **tables, "answers": answers}


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.method, []).append(record)
    return found


def texts_of(record: Record) -> list[list[int]]:
    """The tokens of its answers."""
    return [turn.tokens for turn in record.turns]


def make_cell(own: list[Record], alone: list[Record]) -> Cell:
    """What is measured of a method by its ``own`` records, next to the target ``alone``."""
    speeds = speed_by_round(own)
    speeds_alone = speed_by_round(alone)
    cell = {"speedup": median(speeds[number] / speeds_alone[number] for number in speeds)}
    stats = add_up(own)
    if stats.steps:  # transformers has none
        cell["accepted"] = stats.accepted_per_level
        cell["mat"] = stats.mean_accepted_tokens
        cell["needs"] = cell["mat"] / cell["speedup"]
    return cell


def speed_by_round(records: list[Record]) -> dict[int, float]:
    """{round: tokens per second}."""
    tokens: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for record in records:
        for turn in record.turns:
            tokens[record.round] += len(turn.tokens)
            seconds[record.round] += turn.seconds
    return {number: tokens[number] / seconds[number] for number in tokens}


def add_up(records: list[Record]) -> Stats:
    """The Stats of all answers of our methods together."""
    total = Stats()
    for record in records:
        for turn in record.turns:
            if turn.generation is None:
                continue
            for field in fields(Stats):
                value = getattr(total, field.name) + getattr(turn.generation.stats, field.name)
                setattr(total, field.name, value)
    return total


def mean_column(columns: Sequence[Column]) -> Column:
    """Means over ``columns``, of the rows that all of them have."""
    means: Column = {}
    for row, cell in columns[0].items():
        if all(row in column for column in columns):
            means[row] = {key: mean(column[row][key] for column in columns) for key in cell}
    return means


def table(legend: str, columns: dict[str, Column], measures: Sequence[str]) -> str:
    """A ``legend`` and the ``columns``: cells show those of the ``measures`` that they have."""
    lines = [["", *columns]]
    for row in next(iter(columns.values())):
        line = [row]
        for column in columns.values():
            cell = column.get(row, {})
            line.append(" / ".join(f"{cell[key]:.2f}" for key in measures if key in cell))
        lines.append(line)
    return f"{legend}\n\n{render(lines)}\n"


def acceptance_table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The share of drafted tokens that were accepted by position; and what the exits did."""
    lines = [["", "accepted at 1, 2, ...", "by exit: asked / drafted / accepted"]]
    for method, accepted in found.items():
        rates = " ".join(f"{rate:.0%}" for rate in accepted["rates_per_pos"])
        exits = []
        for layer, counts in accepted["per_exit"].items():
            exits.append(f"{layer}: {' / '.join(map(str, counts.values()))}")
        lines.append([method, rates, "; ".join(exits)])
    return lines


def render(lines: list[list[str]]) -> str:
    """A table in markdown, whose columns are aligned."""
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def write_plot(file: Path, columns: dict[str, Column], across: int) -> None:
    """Speedups as bars, a panel for each column, ``across`` of them in a line. By matplotlib.

    The name of the ``file`` ends in .svg, .png or .pdf.
    """
    from matplotlib.figure import Figure

    down = ceil(len(columns) / across)
    size = (4 * across, down * (1 + len(next(iter(columns.values()))) / 4))
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, (title, column) in zip(grid.flat, columns.items()):
        bars = axes.barh(list(column), [cell["speedup"] for cell in column.values()])
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.margins(x=0.2)  # where the values stand
        axes.set_title(title)
    grid[0][0].invert_yaxis()  # the first row on top, in all panels as they share it
    figure.supxlabel("speedup over the target alone (ar)")
    with staged(file) as stage:
        figure.savefig(stage)
