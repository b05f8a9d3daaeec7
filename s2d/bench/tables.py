"""From the benchmark's records to its tables. Knows nothing about models or timing."""

import statistics
from collections import Counter

from ..train.corpus import GROUPS


def summarise(records):
    """Records of one target and temperature -> {method: {"speedup": median over rounds, "mat": ..., ...}}.

    Speedups are ratios of tokens per second to "ar" in the same round: overall, and by group.
    """
    tokens, seconds = Counter(), Counter()
    for record in records:
        for group in (record["group"], "overall"):
            key = record["method"], group, record["round"]
            tokens[key] += sum(record["new_tokens"])
            seconds[key] += sum(record["wall_time"])
    rounds = sorted({record["round"] for record in records})
    groups = [group for group in GROUPS if any(record["group"] == group for record in records)] + [
        "overall"
    ]

    def ratios(method, group):
        keys = [((method, group, number), ("ar", group, number)) for number in rounds]
        return [
            tokens[a] / seconds[a] * seconds[b] / tokens[b]
            for a, b in keys
            if tokens[a] and tokens[b]
        ]

    summary = {}
    for method in dict.fromkeys(record["method"] for record in records):
        own = [record for record in records if record["method"] == method]
        total = lambda key: sum(sum(record.get(key, ())) for record in own)  # noqa: E731, B023
        spread = ratios(method, "overall")
        row = {"speedup": statistics.median(spread), "low": min(spread), "high": max(spread)}
        row["groups"] = {group: statistics.median(ratios(method, group)) for group in groups}
        if "decoding_steps" in own[0]:
            exits = sum(
                (Counter(counts) for record in own for counts in record["exit_counts"]), Counter()
            )
            row["mat"] = total("new_tokens") / total("decoding_steps")
            row["rate"] = total("accepted") / max(1, total("draft_levels"))
            row["forwards"] = total("draft_forwards") / total("decoding_steps")
            row["exits"] = {layer: exits[layer] / exits.total() for layer in sorted(exits, key=int)}
            row["draft"], row["target"] = (
                total(f"{part}_seconds") / total("wall_time") for part in ("draft", "target")
            )
            row["exact"] = all(all(record["exact"]) for record in own)
            row["ms"] = 1000 * total("later_seconds") / max(1, total("later_tokens"))
            if total("expected_seconds"):
                row["expected"] = total("expected_alone") / total("expected_seconds")
        summary[method] = row
    return summary


def target_table(summary):
    """One target at one temperature, in full: a list of rows of text. MAT and draft passes are by step.

    Where there is "auto", its last column is the speedup it expected, by that which was measured after each prompt was read.
    """
    groups = list(next(iter(summary.values()))["groups"])
    lines = [
        [
            "method",
            *groups,
            "spread",
            "MAT",
            "draft passes",
            "accepted",
            "exits",
            "draft/target/rest",
            "exact",
        ]
    ]
    tuned = any("expected" in row for row in summary.values())
    lines[0] += ["expected"] * tuned
    for method, row in summary.items():
        line = [
            method,
            *(f"{row['groups'][group]:.2f}" for group in groups),
            f"{row['low']:.2f}-{row['high']:.2f}",
        ]
        if "mat" in row:
            shares = " ".join(f"{layer}:{share:.0%}" for layer, share in row["exits"].items())
            rest = 1 - row["draft"] - row["target"]
            line += [f"{row['mat']:.2f}", f"{row['forwards']:.1f}", f"{row['rate']:.0%}" if shares else "", shares,
                     f"{row['draft']:.0%}/{row['target']:.0%}/{rest:.0%}", "yes" if row["exact"] else "NO"]  # fmt: skip
            line += (
                [f"{row['expected'] * row['ms'] / summary['ar']['ms']:.2f}"]
                if "expected" in row
                else []
            )
        lines.append(line + [""] * (len(lines[0]) - len(line)))
    return lines


def final_table(summaries):
    """{(target, temperature): summary} -> methods x (target, temperature), speedup / MAT, and the mean speedup."""
    lines = [
        ["method", *(f"{target} T={temperature:g}" for target, temperature in summaries), "mean"]
    ]
    for method in dict.fromkeys(method for summary in summaries.values() for method in summary):
        cells, speedups = [], []
        for summary in summaries.values():
            row = summary.get(method)
            cells.append(
                ""
                if row is None
                else f"{row['speedup']:.2f}" + (f" / {row['mat']:.2f}" if "mat" in row else "")
            )
            speedups += [] if row is None else [row["speedup"]]
        lines.append([method, *cells, f"{statistics.mean(speedups):.2f}"])
    return lines


def render(lines, markdown):
    """A table as aligned text, or as markdown."""
    if markdown:
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )
