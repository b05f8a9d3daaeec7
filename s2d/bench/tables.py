"""From the benchmark's records to its tables. Knows nothing about measuring."""

import statistics
from collections import Counter

from ..train.corpus import GROUPS

COLUMNS = ["spread", "draft passes", "accepted/published", "exits", "draft/target/rest", "exact"]


def summarise(records):
    """{method: {"speedup": median over rounds, "mat": ..., ...}} of one target and temperature.

    Speedups are ratios of tokens per second to "ar" in the same round: overall, and by group.
    """
    tokens, seconds = Counter(), Counter()
    for record in records:
        for group in (record["group"], "overall"):
            key = record["method"], group, record["round"]
            tokens[key] += sum(record["new_tokens"])
            seconds[key] += sum(record["wall_time"])
    rounds = sorted({record["round"] for record in records})
    present = {record["group"] for record in records} | {"overall"}
    groups = [group for group in (*GROUPS, "overall") if group in present]

    def ratios(method, group):
        pairs = [((method, group, number), ("ar", group, number)) for number in rounds]
        pairs = [(a, b) for a, b in pairs if tokens[a] and tokens[b]]
        return [tokens[a] / seconds[a] * seconds[b] / tokens[b] for a, b in pairs]

    summary = {}
    for method in dict.fromkeys(record["method"] for record in records):
        spread = ratios(method, "overall")
        row = {"speedup": statistics.median(spread), "low": min(spread), "high": max(spread)}
        row["groups"] = {}
        for group in groups:
            generations = generations_of(records, method, group)
            mat = {"mat": mean_accepted_tokens(generations)} if generations else {}
            row["groups"][group] = {"speedup": statistics.median(ratios(method, group)), **mat}
        summary[method] = row | (by_step(generations) if generations else {})
    return summary


def generations_of(records, method, group):
    """All Generations of a method; none of the peer's."""
    own = [record for record in records if record["method"] == method]
    own = [record for record in own if group in (record["group"], "overall")]
    return [each for record in own for each in record["generations"] if each]


def mean_accepted_tokens(generations):
    steps = sum(generation.stats.steps for generation in generations)
    return sum(len(generation.tokens) for generation in generations) / steps


def by_step(generations):
    """What the Generations of one of our methods say beside its speed."""

    def total(name):
        return sum(getattr(generation.stats, name) for generation in generations)

    levels, roots = total("draft_levels"), total("root_levels")
    exits = sum((Counter(generation.stats.exit_counts) for generation in generations), Counter())
    return {
        "mat": mean_accepted_tokens(generations),
        "rate": total("accepted") / max(1, levels - roots),
        "published": (total("accepted") + roots) / max(1, levels),
        "forwards": total("draft_forwards") / total("steps"),
        "exits": {layer: exits[layer] / exits.total() for layer in sorted(exits)},
        "draft": total("draft_seconds") / total("seconds"),
        "target": total("target_seconds") / total("seconds"),
        "exact": all(generation.exact for generation in generations),
    }


def target_table(summary):
    """One target at one temperature in full: rows of text. MAT and draft passes are by step."""
    groups = list(next(iter(summary.values()))["groups"])
    lines = [["method", *groups, *COLUMNS]]
    for method, row in summary.items():
        line = [method, *(cell(row["groups"][group]) for group in groups)]
        line.append(f"{row['low']:.2f}-{row['high']:.2f}")
        if "mat" in row:
            exits = " ".join(f"{layer}:{part:.0%}" for layer, part in row["exits"].items())
            parts = (row["draft"], row["target"], 1 - row["draft"] - row["target"])
            line += [f"{row['forwards']:.1f}"]
            line += [f"{row['rate']:.0%}/{row['published']:.0%}" if exits else "", exits]
            line += ["/".join(f"{part:.0%}" for part in parts), "yes" if row["exact"] else "NO"]
        lines.append(line + [""] * (len(lines[0]) - len(line)))
    return lines


def final_table(summaries):
    """{(target, temperature): summary} -> methods x (target, temperature): speedup / MAT, mean."""
    heads = [f"{target} T={temperature:g}" for target, temperature in summaries]
    lines = [["method", *heads, "mean"]]
    for method in dict.fromkeys(method for summary in summaries.values() for method in summary):
        rows = [summary.get(method) for summary in summaries.values()]
        mean = statistics.mean(row["speedup"] for row in rows if row)
        lines.append([method, *map(cell, rows), f"{mean:.2f}"])
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
