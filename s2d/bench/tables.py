"""From the benchmark's records to its tables. Knows nothing about measuring."""

from collections import Counter, defaultdict
from dataclasses import fields
from statistics import mean, median

from ..decode import Stats
from ..train.corpus import GROUPS

COLUMNS = ["spread", "tokens/s", "draft passes", "accepted/published", "exits"]
COLUMNS += ["draft/target/rest", "exact"]


def summarise(records):
    """{method: {"speedup": median over rounds, "mat": ..., ...}} of one target and temperature.

    Speedups are ratios of tokens per second to "ar" in the same round: overall, and by group. What
    stands in one of COLUMNS is a text.
    """
    found, summary = defaultdict(list), {}
    for record in records:
        for group in {record["group"], "overall"}:
            found[record["method"], group].append(record)
    for method in dict.fromkeys(record["method"] for record in records):
        summary[method] = row = {"groups": {}}
        for group in [group for group in (*GROUPS, "overall") if (method, group) in found]:
            speeds, base = by_round(found[method, group]), by_round(found["ar", group])
            ratios = [speeds[number] / base[number] for number in speeds]
            row["groups"][group] = {"speedup": median(ratios)}
            own = [g for record in found[method, group] for g in record["generations"] if g]
            if own:  # the peer has none
                row["groups"][group]["mat"] = total(own).mean_accepted_tokens
        row |= row["groups"]["overall"] | (by_step(own) if own else {})
        row["tokens/s"] = f"{median(speeds.values()):.1f}"
        row["spread"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return summary


def by_round(records):
    """{round: tokens per second}."""
    tokens, seconds = Counter(), Counter()
    for record in records:
        tokens[record["round"]] += sum(map(len, record["tokens"]))
        seconds[record["round"]] += sum(record["wall_time"])
    return {number: tokens[number] / seconds[number] for number in tokens}


def total(generations):
    """Their Stats, as if they were one."""
    whole = Stats()
    for generation in generations:
        for name in (field.name for field in fields(Stats)):
            setattr(whole, name, getattr(whole, name) + getattr(generation.stats, name))
    return whole


def by_step(generations):
    """What the Generations of one of our methods say beside its speed, for COLUMNS."""
    stats = total(generations)
    exits, left = sorted(stats.exit_counts.items()), stats.exit_counts.total()
    rates = stats.acceptance_rate, stats.published_acceptance_rate
    draft, target = stats.draft_seconds / stats.seconds, stats.target_seconds / stats.seconds
    parts = draft, target, 1 - draft - target
    return {
        "draft passes": f"{stats.draft_forwards / stats.steps:.1f}",  # a step
        "accepted/published": "/".join(f"{rate:.0%}" for rate in rates) if exits else "",
        "exits": " ".join(f"{exit_layer}:{count / left:.0%}" for exit_layer, count in exits),
        "draft/target/rest": "/".join(f"{part:.0%}" for part in parts),
        "exact": "yes" if all(generation.exact for generation in generations) else "NO",
    }


def target_table(summary):
    """One target at one temperature in full: rows of text."""
    lines = [["method", *next(iter(summary.values()))["groups"], *COLUMNS]]
    for method, row in summary.items():
        texts = [row.get(column, "") for column in COLUMNS]
        lines.append([method, *map(cell, row["groups"].values()), *texts])
    return lines


def final_table(summaries):
    """{(target, temperature): summary} -> methods x (target, temperature): speedup / MAT, mean."""
    heads = [f"{target} T={temperature:g}" for target, temperature in summaries]
    lines = [["method", *heads, "mean"]]
    for method in dict.fromkeys(method for summary in summaries.values() for method in summary):
        rows = [summary.get(method) for summary in summaries.values()]
        average = mean(row["speedup"] for row in rows if row)
        lines.append([method, *map(cell, rows), f"{average:.2f}"])
    return lines


def cell(row):
    mat = f" / {row['mat']:.2f}" if row and "mat" in row else ""
    return f"{row['speedup']:.2f}{mat}" if row else ""


def render(lines, markdown=False):
    """A table as aligned text, or as markdown."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
