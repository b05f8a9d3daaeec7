"""From records to results {column: {row: {measure: value}}}, and from these to tables."""

from collections import Counter, defaultdict
from dataclasses import fields
from statistics import mean, median

from ..decode import Stats
from ..train.corpus import GROUPS

FORMATS = {"speedup": ".2f", "mat": ".2f", "layers": ".1f", "accepted": ".0%", "right": ".0%"}
FORMATS |= {"log-probability": ".2f", "µs": ".0f", "text": ""}


def summarise(records):
    """A result: speedup and accepted tokens by group and "overall", then ``details``.

    Speedups are ratios of tokens per second to "ar" in the same round, medians over rounds.
    """
    result, everything = defaultdict(dict), by_method(records)
    for group in (*GROUPS, "overall"):
        found = by_method(each for each in records if group in (each["group"], "overall"))
        for method, own in found.items():
            cell = {"speedup": median(ratios(own, found["ar"]))}
            if own[0]["generations"][0]:  # transformers has none
                cell["mat"] = total(generations_of(own)).mean_accepted_tokens
            result[group][method] = cell
    for method, own in everything.items():
        for name, text in details(own, everything["ar"]).items():
            result[name][method] = {"text": text}
    return dict(result)


def details(records, base):
    """What else is said of a method at one target and temperature, as texts."""
    spread, speed = ratios(records, base), median(by_round(records).values())
    texts = {"spread": f"{min(spread):.2f}-{max(spread):.2f}", "tokens/s": f"{speed:.1f}"}
    own = generations_of(records)
    if not own[0]:
        return texts
    stats = total(own)
    exits = sorted(stats.exit_counts.items())
    shares = [f"{layer}:{count / stats.exit_counts.total():.0%}" for layer, count in exits]
    draft, target = stats.draft_seconds / stats.seconds, stats.target_seconds / stats.seconds
    return texts | {
        "draft passes": f"{stats.draft_forwards / stats.steps:.1f}",  # per step
        "accepted": f"{stats.acceptance_rate:.0%}" if exits else "",
        "exits": " ".join(shares),
        "draft/target/rest": f"{draft:.0%}/{target:.0%}/{1 - draft - target:.0%}",
        "exact": "yes" if all(each.exact for each in own) else "NO",
    }


def by_method(records):
    found = defaultdict(list)
    for record in records:
        found[record["method"]].append(record)
    return found


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


def generations_of(records):
    return [generation for record in records for generation in record["generations"]]


def total(generations):
    """Their Stats, as if they were one."""
    whole = Stats()
    for generation in generations:
        for name in (field.name for field in fields(Stats)):
            setattr(whole, name, getattr(whole, name) + getattr(generation.stats, name))
    return whole


def table(result, mean_of=()):
    """Rows of text: the columns of a result; last the means over them of the measures named."""
    rows = dict.fromkeys(row for column in result.values() for row in column)
    lines = [["", *result, *["mean"] * bool(mean_of)]]
    for row in rows:
        cells = [column.get(row, {}) for column in result.values()]
        line = [row, *map(shown, cells)]
        if mean_of:
            known = [key for key in mean_of if any(key in cell for cell in cells)]
            line.append(shown({k: mean(c[k] for c in cells if k in c) for k in known}))
        lines.append(line)
    return lines


def shown(cell):
    return " / ".join(format(value, FORMATS[key]) for key, value in cell.items())


def render(lines, markdown=False):
    """A table as aligned text, or as markdown."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
