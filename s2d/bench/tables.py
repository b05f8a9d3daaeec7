"""From records to results {column: {row: {measure: value}}}, and from these to tables."""

from collections import Counter, defaultdict
from dataclasses import fields
from itertools import product
from statistics import mean, median

from ..decode import Stats
from ..train.corpus import GROUPS

FORMATS = {"speedup": ".2f", "mat": ".2f", "layers": ".1f", "accepted": ".0%", "right": ".0%"}
FORMATS |= {"log-probability": ".2f", "µs": ".0f", "text": ""}


def summarise(records):
    """A result: speedup and accepted tokens by group and "overall", then ``details``.

    Speedups are ratios of tokens per second to "ar" in the same round, medians over rounds.
    """
    result, methods = defaultdict(dict), dict.fromkeys(record["method"] for record in records)
    for group, method in product((*GROUPS, "overall"), methods):
        inside = [r for r in records if group in (r["group"], "overall")]
        own, base = ([r for r in inside if r["method"] == name] for name in (method, "ar"))
        if own:
            cell = result[group][method] = {"speedup": median(ratios(own, base))}
            if own[0]["generations"][0]:  # transformers has none
                stats = total(own)
                cell |= {"mat": stats.mean_accepted_tokens, "accepted": stats.acceptance_rate}
        if group == "overall":
            for name, text in details(own, base).items():
                result[name][method] = {"text": text}
    return dict(result)


def details(records, base):
    """What else is said of a method at one target and temperature, as texts."""
    spread, speed = ratios(records, base), median(by_round(records).values())
    texts = {"spread": f"{min(spread):.2f}-{max(spread):.2f}", "tokens/s": f"{speed:.1f}"}
    own = [generation for record in records for generation in record["generations"]]
    if not own[0]:
        return texts
    stats = total(records)
    exits, drafted = sorted(stats.exit_counts.items()), stats.exit_counts.total()
    draft, target = stats.draft_seconds / stats.seconds, stats.target_seconds / stats.seconds
    return texts | {
        "accepted": f"{stats.acceptance_rate:.0%}" if exits else "",
        "exits": " ".join(f"{layer}:{count / drafted:.0%}" for layer, count in exits),
        "draft/target/rest": f"{draft:.0%}/{target:.0%}/{1 - draft - target:.0%}",
        "exact": "yes" if all(each.exact for each in own) else "NO",
    }


def ratios(records, base):
    """The speed over that of ``base`` in each round."""
    speeds, others = by_round(records), by_round(base)
    return [speeds[number] / others[number] for number in speeds]


def by_round(records):
    """{round: tokens per second}."""
    tokens, seconds = Counter(), Counter()
    for record in records:
        tokens[record["round"]] += sum(map(len, record["tokens"]))
        seconds[record["round"]] += sum(record["wall_time"])
    return {number: tokens[number] / seconds[number] for number in tokens}


def total(records):
    """The Stats of all their Generations, as if they were one."""
    whole = Stats()
    for generation in (each for record in records for each in record["generations"]):
        for name in (field.name for field in fields(Stats)):
            setattr(whole, name, getattr(whole, name) + getattr(generation.stats, name))
    return whole


def table(result, measures, means=False):
    """Rows of text: the columns of a result, and with ``means`` the means over them."""
    rows = dict.fromkeys(row for column in result.values() for row in column)
    lines = [["", *result, *["mean"] * means]]
    for row in rows:
        cells = [column.get(row, {}) for column in result.values()]
        if means:
            known = [key for key in measures if any(key in cell for cell in cells)]
            cells.append({key: mean(c[key] for c in cells if key in c) for key in known})
        texts = [[format(c[key], FORMATS[key]) for key in measures if key in c] for c in cells]
        lines.append([row, *map(" / ".join, texts)])
    return lines


def render(lines, markdown=False):
    """A table as aligned text, or as markdown."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
