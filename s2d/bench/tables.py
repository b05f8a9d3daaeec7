"""From records to tables, a picture and JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

from ..checkpoint.files import staged
from ..cli.terminal import acceptance, rates_by_position
from ..stats import Generation, Stats
from ..train.corpus import GROUPS
from .measure import Record

Cell = dict[str, float]  # {measure: value}
Result = dict[str, dict[str, Cell]]  # {column: {row: cell}}

FORMATS = {"speedup": ".2f", "mat": ".2f", "needs": ".2f", "accepted": ".0%", "same text": ".0%"}


@dataclass(frozen=True)
class Comparison:
    """What methods did in all rounds, on one target at one temperature. Printed, it is tables."""

    title: str
    records: list[Record]

    @cached_property
    def by_group(self) -> Result:
        """Columns are the groups of tasks and "overall", and rows are the methods.

        A speedup is the ratio of tokens per second to "ar" in the same round, the median over
        rounds. "same text" is the share of answers that are those of "ar", "accepted" the accepted
        tokens per drafted level, and "needs" the tokens per step with which a method would be as
        fast as "ar".
        """
        result: Result = {}
        for group in (*GROUPS, "overall"):
            inside = []
            for record in self.records:
                if group in (record.question["group"], "overall"):
                    inside.append(record)
            rows = by_method(inside)
            for method, own in rows.items():
                cell = make_cell(own, rows["ar"])
                result.setdefault(group, {})[method] = cell
        return result

    @cached_property
    def acceptance(self) -> dict[str, dict[str, Any]]:
        """{method that drafts: what was accepted}, see ``cli.terminal.acceptance``."""
        found = {}
        for method, own in by_method(self.records).items():
            generations = generations_of(own)
            if generations and generations[0].options.exits:  # not transformers, not "ar"
                found[method] = acceptance(add_up(generations), generations[0].options.exits)
        return found

    def __str__(self) -> str:
        title = f"{self.title}: speedup / mean accepted tokens"
        parts = [title, render(table(self.by_group, ("speedup", "mat")))]
        if self.acceptance:
            parts.append(render(acceptance_table(self.acceptance)))
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> dict[str, Any]:
        """What is printed, the options of the methods, and each answer of each round."""
        options = {}
        answers = []
        for record in self.records:
            turns = [turn._asdict() for turn in record.turns]
            for turn in turns:
                made = turn.pop("generation")
                if made is not None:  # transformers has none
                    options[record.method] = vars(made.options)
                    turn["stats"] = vars(made.stats)
            answers.append(record._asdict() | {"turns": turns})
        tables = {"by_group": self.by_group, "acceptance": self.acceptance}
        return {"title": self.title, "options": options, **tables, "answers": answers}


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.method, []).append(record)
    return found


def make_cell(own: list[Record], alone: list[Record]) -> Cell:
    """What is measured of a method by its ``own`` records, next to the target ``alone``."""
    speeds = speed_by_round(own)
    speeds_alone = speed_by_round(alone)
    ratios = [speeds[number] / speeds_alone[number] for number in speeds]
    same = [one.texts == other.texts for one, other in zip(own, alone)]
    cell = {"speedup": median(ratios), "same text": mean(same)}
    generations = generations_of(own)
    if generations:  # transformers has none
        stats = add_up(generations)
        cell["accepted"] = stats.acceptance_rate
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


def generations_of(records: Iterable[Record]) -> list[Generation]:
    turns = [turn for record in records for turn in record.turns]
    return [turn.generation for turn in turns if turn.generation is not None]


def add_up(generations: list[Generation]) -> Stats:
    """The Stats of several generations together."""
    total = Stats()
    for generation in generations:
        for field in fields(Stats):
            value = getattr(total, field.name) + getattr(generation.stats, field.name)
            setattr(total, field.name, value)
    return total


def fastest(column: dict[str, Cell], rows: Iterable[str]) -> str:
    return max(rows, key=lambda row: column[row]["speedup"])


def rows_of(result: Result) -> list[str]:
    return list(dict.fromkeys(row for column in result.values() for row in column))


def with_means(result: Result) -> Result:
    """A result with one more column, "mean": of each row over the other columns."""
    means: dict[str, Cell] = {}
    for row in rows_of(result):
        cells = [column[row] for column in result.values() if row in column]
        means[row] = {measure: mean(cell[measure] for cell in cells) for measure in cells[0]}
    return result | {"mean": means}


def table(result: Result, measures: Sequence[str]) -> list[list[str]]:
    """Rows of text: the columns of a result, whose cells show ``measures``."""
    lines = [["", *result]]
    for row in rows_of(result):
        line = [row]
        for column in result.values():
            cell = column.get(row, {})
            known = [measure for measure in measures if measure in cell]
            line.append(" / ".join(format(cell[each], FORMATS[each]) for each in known))
        lines.append(line)
    return lines


def best_table(results: dict[str, Result], rows: Sequence[str], name: str) -> list[list[str]]:
    """What is lost by not knowing which of ``rows`` is fastest: ``name`` next to it.

    ``results`` are {title: Result by groups}. A cell has the fastest of ``rows``, its speedup, that
    of ``name``, and how many times as fast ``name`` is. The last column has the mean of the latter.
    """
    lines = [["", *results, f"mean of {name} / best"]]
    for group in (*GROUPS, "overall"):
        line = [group]
        ratios = []
        for by_group in results.values():
            column = by_group.get(group)
            if column is None:  # no question of this group
                line.append("")
                continue
            best = fastest(column, rows)
            alone = column[best]["speedup"]
            own = column[name]["speedup"]
            ratios.append(own / alone)
            line.append(f"{best} {alone:.2f} / {own:.2f} / {own / alone:.2f}")
        if ratios:
            lines.append([*line, f"{mean(ratios):.2f}"])
    return lines


def acceptance_table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The share of drafted tokens that were accepted by position; and what the exits did."""
    lines = [["", "accepted at 1, 2, ...", "by exit: asked / sure / drafted / accepted"]]
    for method, accepted in found.items():
        rates = " ".join(f"{rate:.0%}" for rate in rates_by_position(accepted))
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


def write_plot(file: Path, result: Result, across: int) -> None:
    """Speedups as bars, a panel for each column, ``across`` of them in a line. By matplotlib.

    The name of the ``file`` ends in .svg, .png or .pdf.
    """
    from matplotlib.figure import Figure

    names = rows_of(result)
    down = ceil(len(result) / across)
    size = (4 * across, down * (1 + len(names) / 4))
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, (title, column) in zip(grid.flat, result.items()):
        bars = axes.barh(list(column), [cell["speedup"] for cell in column.values()])
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.margins(x=0.2)  # where the values stand
        axes.set_title(title)
    grid[0][0].invert_yaxis()  # the first row on top, in all panels as they share it
    figure.supxlabel("speedup over the target alone (ar)")
    with staged(file) as stage:
        figure.savefig(stage)
