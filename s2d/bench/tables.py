"""From records to a Result, and from that to a table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from itertools import product
from statistics import mean, median

from ..cli.terminal import acceptance, rates_by_position
from ..decoder import Generation, Stats
from ..train.corpus import GROUPS
from .measure import Record

Cell = dict[str, float]  # {measure: value}
Result = dict[str, dict[str, Cell]]  # {column: {row: cell}}

DETAILS = ("lowest", "highest", "tokens/s", "accepted", "layers", "draft time", "target time")
FORMATS = dict.fromkeys(("speedup", "lowest", "highest", "mat", "log-probability"), ".2f")
FORMATS |= dict.fromkeys(("accepted", "right", "draft time", "target time"), ".0%")
FORMATS |= {"tokens/s": ".1f", "layers": ".1f", "µs": ".0f"}


def summarise(records: list[Record]) -> Result:
    """A Result whose columns are the groups and "overall", and whose rows are the methods.

    Speedups are ratios of tokens per second to "ar" in the same round: the median over rounds, the
    lowest and the highest.
    """
    result: Result = {}
    methods = dict.fromkeys(record["method"] for record in records)
    for group, method in product((*GROUPS, "overall"), methods):
        inside = [r for r in records if group in (r["group"], "overall")]
        own = [r for r in inside if r["method"] == method]
        if not own:
            continue
        speeds = speed_by_round(own)
        alone = speed_by_round(r for r in inside if r["method"] == "ar")
        ratios = [speeds[number] / alone[number] for number in speeds]
        cell = {"speedup": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        cell["tokens/s"] = median(speeds.values())
        if own[0]["generations"][0]:  # transformers has none
            cell |= count(each for record in own for each in record["generations"])
        result.setdefault(group, {})[method] = cell
    return result


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
        "target time": stats.target_seconds / stats.seconds,
    }


def speed_by_round(records: Iterable[Record]) -> dict[int, float]:
    """{round: tokens per second}."""
    tokens: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for record in records:
        tokens[record["round"]] += sum(map(len, record["tokens"]))
        seconds[record["round"]] += sum(record["wall_time"])
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


def keep_best(result: Result, name: str) -> tuple[Result, dict[str, str]]:
    """(``result`` with few rows for the many settings of a method, {column: the fastest setting}).

    The row ``name`` has the method's defaults and stays. Rows called ``name:setting`` make room for
    one that has, in each column, the fastest of them all.
    """
    kept: Result = {}
    chosen = {}
    for title, column in result.items():
        kept[title] = {}
        own = [row for row in column if row.partition(":")[0] == name]
        for row, cell in column.items():
            if row not in own or row == name:
                kept[title][row] = cell
            if row == name:
                best = fastest(column, own)
                chosen[title] = best.partition(":")[2] or "as by default"
                kept[title][f"{name}, best setting"] = column[best]
    return kept, chosen


def fastest(column: dict[str, Cell], rows: list[str]) -> str:
    return max(rows, key=lambda row: column[row]["speedup"])


def compare_with_best(
    results: dict[str, Result], single_exits: dict[str, int], name: str
) -> list[list[str]]:
    """What is lost by not knowing which single exit is best: ``name`` next to the best of them.

    Args:
        results: as of ``summarise``, {target and temperature: {group: {row: cell}}}.
        single_exits: {row: the exit that drafts alone}.
        name: the row that chooses exits by itself.

    A row is a group of tasks. A cell has the fastest single exit, its speedup, that of ``name``,
    and how many times as fast ``name`` is; the last column has the mean of the latter.
    """
    lines = [["", *results, "mean"]]
    for group in (*GROUPS, "overall"):
        line = [group]
        ratios = []
        for by_group in results.values():
            if group not in by_group:  # no question of this group
                line.append("")
                continue
            column = by_group[group]
            best = fastest(column, list(single_exits))
            alone = column[best]["speedup"]
            own = column[name]["speedup"]
            ratios.append(own / alone)
            line.append(f"exit {single_exits[best]} {alone:.2f} / {own:.2f} / {own / alone:.2f}")
        if ratios:
            lines.append([*line, f"{mean(ratios):.2f}"])
    return lines


def acceptance_table(records: list[Record]) -> list[list[str]]:
    """How often drafted tokens were accepted: a row for each method that drafts.

    Columns are positions, from 1 on, and exits: how often asked / sure / drafted / accepted, see
    ``cli.terminal.acceptance``.
    """
    found = {}
    for method in dict.fromkeys(record["method"] for record in records):
        generations = []
        for record in records:
            if record["method"] == method:
                generations += record["generations"]
        if generations[0] and generations[0].settings.exits:  # transformers has none, ar no exits
            exits = generations[0].settings.exits
            found[method] = acceptance(add_up(generations), exits)
    depth = max((len(each["num_drafts_per_pos"]) for each in found.values()), default=0)
    layers = sorted({layer for each in found.values() for layer in each["per_exit"]})
    positions = [str(position) for position in range(1, depth + 1)]
    lines = [["", *positions, *(f"exit {layer}" for layer in layers)]]
    for method, each in found.items():
        rates = [f"{rate:.0%}" for rate in rates_by_position(each)]
        line = [method, *rates, *[""] * (depth - len(rates))]
        for layer in layers:
            counts = each["per_exit"].get(layer, {})
            line.append(" / ".join(map(str, counts.values())))
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
