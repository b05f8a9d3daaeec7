"""The experiments of two papers on the miniatures: what they published, ours, does it hold here?

What was measured is kept as JSON in --out; a later run with the same settings takes it from there.
"""

import json
from collections import defaultdict
from statistics import mean

from ..files import staged_file
from ..program import tell
from ..weights import check_device
from .experiments import EXPERIMENTS
from .lab import Lab
from .tables import FORMATS, render, table

SETTINGS = ("limit", "rounds", "max_new_tokens", "device", "dtype")


def report(args):
    """Measure what is not known yet, and print each experiment when it is known."""
    args.device = str(check_device(args.device))
    names = args.only or [n for n, each in EXPERIMENTS.items() if args.drafts or not each.trained]
    lacking = [name for name in names if EXPERIMENTS[name].trained and not args.drafts]
    if lacking:
        made = "made by python -m s2d.train ablations"
        raise ValueError(f"{', '.join(lacking)}: give --drafts, {made}")
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    files = {name: args.out / f"{name}.json" for name in names if args.out}
    known = {}
    for name, file in files.items():
        if file.exists():
            kept = json.loads(file.read_text())
            if kept["settings"] != settings:
                raise ValueError(f"{file} is of {kept['settings']}; name another folder")
            known[name] = kept["result"]
    lab = Lab(args)
    for number, name in enumerate(names, 1):
        tell(f"{number} of {len(names)}: {name}")
        about = EXPERIMENTS[name]
        result = known.get(name) or about.measure(lab, about)
        print(told(name, result, args.markdown), flush=True)
        if args.out and name not in known:
            with staged_file(files[name]) as stage:
                stage.write_text(json.dumps({"settings": settings, "result": result}, indent=1))


def told(name, result, markdown):
    """An experiment as text: title, source, table, and whether its findings hold."""
    about = EXPERIMENTS[name]
    shows = f"`{name}`: {' / '.join(about.measures)}; {about.source}"
    shows += f"; published: {about.note}" if about.note else ""
    lines = table(result, about.measures, means=True)
    lines[1:1] = [[row, *cells.split("|")] for row, cells in about.published.items()]
    heading = f"{'### ' if markdown else ''}{about.title}"
    found = verdict(about.findings, result)
    return "\n\n".join((heading, shows, render(lines, markdown), found)) + "\n"


def verdict(findings, result):
    """Whether all findings hold, and the figures that say so."""
    judged = [judge(finding, result) for finding in findings]
    others = [word for word, _ in judged if word != "holds"]
    return f"{others[0] if others else 'holds'} here: {'; '.join(said for _, said in judged)}"


def judge(finding, result):
    """(whether one Finding holds, its figures)."""
    measure, columns = finding.measure, result.values()
    values = {row: mean(each[row][measure] for each in columns) for row in [*columns][0]}
    values.setdefault("the target alone", 1.0)
    row, other = (max(rows, key=values.get) for rows in (finding.rows, finding.others))
    texts = [format(values[each], FORMATS[measure]) for each in (row, other)]
    figures = f"{measure} of {row} {texts[0]}, of {other} {texts[1]}"
    if not finding.by_seed:
        ratio = values[row] / values[other]
        word = "holds" if ratio > finding.factor else "does not hold"
        return word, f"{figures}: {ratio:.2f} times"
    gains = defaultdict(list)  # by seed
    for column, cells in result.items():
        gains[column.partition(" T=")[0]].append(cells[row][measure] - cells[other][measure])
    gains = [mean(each) for each in gains.values()]
    gain, noise = mean(gains), max(gains) - min(gains)
    word = "holds" if gain > finding.factor * noise else "does not hold"
    if finding.factor > 0 and abs(gain) <= noise:
        word = "no difference beyond noise"
    return word, f"{figures}: {gain:+.2f} (seeds differ by {noise:.2f})"
