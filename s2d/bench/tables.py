"""From records to a Result, and from that to a table or a picture."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from itertools import product
from pathlib import Path
from statistics import mean, median

from ..cli.terminal import acceptance, rates_by_position
from ..stats import Generation, Stats
from ..train.corpus import GROUPS
from .measure import Record

Cell = dict[str, float]  # {measure: value}
Result = dict[str, dict[str, Cell]]  # {column: {row: cell}}

FORMATS = dict.fromkeys(("speedup", "lowest", "highest", "mat"), ".2f")
FORMATS |= dict.fromkeys(("accepted", "same text", "draft time"), ".0%")
FORMATS |= {"tokens/s": ".1f", "layers": ".1f"}
DETAILS = ("lowest", "highest", "tokens/s", "same text", "accepted", "layers", "draft time")


def summarise(records: list[Record]) -> Result:
    """A Result whose columns are the groups and "overall", and whose rows are the methods.

    Speedups are ratios of tokens per second to "ar" in the same round: the median over rounds, the
    lowest and the highest. The same text is the share of answers that are those of "ar".
    """
    result: Result = {}
    methods = dict.fromkeys(record.method for record in records)
    for group, method in product((*GROUPS, "overall"), methods):
        inside = [r for r in records if group in (r.question["group"], "overall")]
        own = [r for r in inside if r.method == method]
        if not own:
            continue
        alone = [r for r in inside if r.method == "ar"]
        speeds = speed_by_round(own)
        speeds_alone = speed_by_round(alone)
        ratios = [speeds[number] / speeds_alone[number] for number in speeds]
        cell = {"speedup": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        cell["tokens/s"] = median(speeds.values())
        same = [tokens_of(one) == tokens_of(other) for one, other in zip(own, alone)]
        cell["same text"] = mean(same)
        if own[0].turns[0].generation:  # transformers has none
            cell |= count(turn.generation for record in own for turn in record.turns)
        result.setdefault(group, {})[method] = cell
    return result


def tokens_of(record: Record) -> list[list[int]]:
    return [turn.tokens for turn in record.turns]


def add_up(generations: Iterable[Generation]) -> Stats:
    """The Stats of several generations together."""
    stats = Stats()
    for generation in generations:
        for field in fields(Stats):
            value = getattr(stats, field.name) + getattr(generation.stats, field.name)
            setattr(stats, field.name, value)
    return stats


def count(generations: Iterable[Generation]) -> Cell:
    """The cell of several generations; "layers" are those that a drafted token took."""
    stats = add_up(generations)
    layers = sum(layer * count for layer, count in stats.exit_counts.items())
    return {
        "mat": stats.mean_accepted_tokens,
        "accepted": stats.acceptance_rate,
        "layers": layers / max(1, stats.exit_counts.total()),
        "draft time": stats.draft_seconds / stats.seconds,
    }


def speed_by_round(records: Iterable[Record]) -> dict[int, float]:
    """{round: tokens per second}."""
    tokens: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for record in records:
        tokens[record.round] += sum(len(turn.tokens) for turn in record.turns)
        seconds[record.round] += sum(turn.seconds for turn in record.turns)
    return {number: tokens[number] / seconds[number] for number in tokens}


def table(result: Result, measures: Iterable[str], means: bool = False) -> list[list[str]]:
    """Rows of text: the columns of a result, and with ``means`` the means over them.

    A cell shows ``measures``; where a column is named after a measure, that one.
    """
    lines = [["", *result, *["mean"] * means]]
    for row in dict.fromkeys(row for column in result.values() for row in column):
        cells = {title: column.get(row, {}) for title, column in result.items()}
        if means:
            every = {key: [c[key] for c in cells.values() if key in c] for key in measures}
            cells["mean"] = {key: mean(values) for key, values in every.items() if values}
        line = [row]
        for title, cell in cells.items():
            shown = [title] if title in FORMATS else measures
            line.append(" / ".join(format(cell[k], FORMATS[k]) for k in shown if k in cell))
        lines.append(line)
    return lines


def add_best(result: Result, rows: list[str], name: str) -> dict[str, str]:
    """Add a row ``name`` that has, in each column, the fastest of ``rows``: {column: which}."""
    chosen = {}
    for title, column in result.items():
        chosen[title] = max(rows, key=lambda row: column[row]["speedup"])  # noqa: B023
        column[name] = column[chosen[title]]
    return chosen


def acceptance_table(records: list[Record]) -> list[list[str]]:
    """How often drafted tokens were accepted: a row for each method that drafts.

    Columns are positions, from 1 on, and exits: how often asked / sure / drafted / accepted, see
    ``cli.terminal.acceptance``.
    """
    found = {}
    for method in dict.fromkeys(record.method for record in records):
        own = [turn.generation for r in records if r.method == method for turn in r.turns]
        if own[0] and own[0].options.exits:  # transformers has none, ar no exits
            found[method] = acceptance(add_up(own), own[0].options.exits)
    depth = max((len(each["num_drafts_per_pos"]) for each in found.values()), default=0)
    layers = sorted({layer for each in found.values() for layer in each["per_exit"]})
    lines = [["", *map(str, range(1, depth + 1)), *(f"exit {layer}" for layer in layers)]]
    for method, each in found.items():
        rates = [f"{rate:.0%}" for rate in rates_by_position(each)]
        line = [method, *rates, *[""] * (depth - len(rates))]
        for layer in layers:
            line.append(" / ".join(map(str, each["per_exit"].get(layer, {}).values())))
        lines.append(line)
    return lines


def render(lines: list[list[str]], markdown: bool = False) -> str:
    """A table as aligned text, or as markdown."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def write_plot(file: Path, result: Result, across: int) -> None:
    """Speedups as bars, a panel for each column, ``across`` of them in a line. By matplotlib."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row for column in result.values() for row in column))
    down = -(-len(result) // across)
    size = (0.09 * max(map(len, names)) + 3 * across, (0.6 + 0.24 * len(names)) * down)
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
    for axes, (title, column) in zip(grid, result.items()):
        values = [cell["speedup"] for cell in column.values()]
        bars = axes.barh([names.index(name) for name in column], values)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.set_yticks(range(len(names)), names)
        axes.set(title=title, ylim=(len(names) - 0.5, -0.5))
    figure.supxlabel("speedup over the target alone (ar)")
    figure.savefig(file)
