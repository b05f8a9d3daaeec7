"""From records to results {column: {row: {measure: value}}}, and from these to tables."""

from collections import Counter, defaultdict
from dataclasses import fields
from itertools import product
from statistics import mean, median

from ..decoder import Stats
from ..train.corpus import GROUPS

DETAILS = ("lowest", "highest", "tokens/s", "accepted", "layers", "draft time", "target time")
FORMATS = dict.fromkeys(("speedup", "lowest", "highest", "mat", "log-probability"), ".2f")
FORMATS |= dict.fromkeys(("accepted", "right", "draft time", "target time"), ".0%")
FORMATS |= {"tokens/s": ".1f", "layers": ".1f", "µs": ".0f"}


def summarise(records):
    """A result whose columns are the groups and "overall".

    Speedups are ratios of tokens per second to "ar" in the same round: the median over rounds, the
    lowest and the highest.
    """
    result, methods = defaultdict(dict), dict.fromkeys(record["method"] for record in records)
    for group, method in product((*GROUPS, "overall"), methods):
        inside = [r for r in records if group in (r["group"], "overall")]
        own = [r for r in inside if r["method"] == method]
        if not own:
            continue
        speeds, alone = by_round(own), by_round(r for r in inside if r["method"] == "ar")
        ratios = [speeds[number] / alone[number] for number in speeds]
        cell = {"speedup": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        cell["tokens/s"] = median(speeds.values())
        if own[0]["generations"][0]:  # transformers has none
            cell |= counts(each for record in own for each in record["generations"])
        result[group][method] = cell
    return dict(result)


def counts(generations):
    """The cell of several generations; "layers" are those that a drafted token took."""
    stats = Stats()
    for generation in generations:
        for field in fields(Stats):
            value = getattr(stats, field.name) + getattr(generation.stats, field.name)
            setattr(stats, field.name, value)
    layers = sum(layer * count for layer, count in stats.exit_counts.items())
    return {
        "mat": stats.mean_accepted_tokens,
        "accepted": stats.acceptance_rate,
        "layers": layers / max(1, stats.exit_counts.total()),
        "draft time": stats.draft_seconds / stats.seconds,
        "target time": stats.target_seconds / stats.seconds,
    }


def by_round(records):
    """{round: tokens per second}."""
    tokens, seconds = Counter(), Counter()
    for record in records:
        tokens[record["round"]] += sum(map(len, record["tokens"]))
        seconds[record["round"]] += sum(record["wall_time"])
    return {number: tokens[number] / seconds[number] for number in tokens}


def table(result, measures, means=False):
    """Rows of text: the columns of a result, and with ``means`` the means over them.

    A cell shows ``measures``; where a column is named after a measure, that one.
    """
    rows = dict.fromkeys(row for column in result.values() for row in column)
    lines = [["", *result, *["mean"] * means]]
    for row in rows:
        cells = {title: column.get(row, {}) for title, column in result.items()}
        if means:
            every = {key: [c[key] for c in cells.values() if key in c] for key in measures}
            cells["mean"] = {key: mean(values) for key, values in every.items() if values}
        lines.append([row])
        for title, cell in cells.items():
            shown = [title] if title in FORMATS else measures
            lines[-1].append(" / ".join(format(cell[k], FORMATS[k]) for k in shown if k in cell))
    return lines


def render(lines, markdown=False):
    """A table as aligned text, or as markdown."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
