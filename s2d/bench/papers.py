"""The experiments of two papers on the miniatures: what they published, ours, does it hold here?

What was measured is kept as JSON in the folder --out, from where a later run with the same settings
takes it. Tables, findings and pictures are made from that alone.
"""

import json
from statistics import mean

from ..files import staged_file
from ..program import tell
from ..weights import check_device
from .experiments import EXPERIMENTS
from .lab import Lab
from .plot import write_plot
from .tables import render, table

SETTINGS = ("limit", "rounds", "max_new_tokens", "device", "dtype")


def report(args):
    """Measure what is not known yet, and print each experiment when it is known."""
    args.device = str(check_device(args.device))
    names = chosen(args)
    known = {name: known_result(args, name) for name in names}  # before anything is measured
    lab = Lab(args)
    for number, name in enumerate(names, 1):
        tell(f"{number} of {len(names)}: {name}")
        about = EXPERIMENTS[name]
        result = known[name] or about.measure(lab, about)
        print(told(name, result, args.markdown), flush=True)
        if args.out and not known[name]:
            with staged_file(args.out / f"{name}.json") as stage:
                kept = {"settings": settings_of(args), "result": result}
                stage.write_text(json.dumps(kept, indent=1) + "\n")
        if args.plot:
            file, key = args.plot / f"{name}.svg", about.measures[0]
            write_plot(file, result, key, f"{about.title}: {key}", across=len(result))


def chosen(args):
    """The names of experiments: without --drafts those that need none."""
    names = args.only or [n for n, each in EXPERIMENTS.items() if args.drafts or not each.trained]
    lacking = [name for name in names if EXPERIMENTS[name].trained and not args.drafts]
    if lacking:
        made = "made by python -m s2d.train ablations"
        raise ValueError(f"{', '.join(lacking)}: give --drafts, {made}")
    return names


def known_result(args, name):
    """The result of an experiment in --out, or None; ValueError where settings were others."""
    file = args.out and args.out / f"{name}.json"
    if not file or not file.exists():
        return None
    kept = json.loads(file.read_text())
    if kept["settings"] != settings_of(args):
        raise ValueError(f"{file} was measured with {kept['settings']}; name another folder")
    return kept["result"]


def settings_of(args):
    return {name: str(getattr(args, name)) for name in SETTINGS}


def told(name, result, markdown):
    """An experiment as text: title, source, table, and whether its findings hold."""
    about = EXPERIMENTS[name]
    shows = f"`{name}`: {' / '.join(about.measures)}; {about.source}"
    shows += f"; published: {about.note}" if about.note else ""
    lines = table(result, mean_of=about.measures)
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
    measure, seeds = finding.measure, {}
    values = {"the target alone": 1.0}
    for row in next(iter(result.values())):
        values[row] = mean(cells[row][measure] for cells in result.values())
    row, other = (max(rows, key=values.get) for rows in (finding.rows, finding.others))
    said = f"{measure} {values[row]:.2f} ({row}), {values[other]:.2f} ({other})"
    if not finding.by_seed:
        ratio = values[row] / values[other]
        word = "holds" if ratio > finding.factor else "does not hold"
        return word, f"{said}, {ratio:.2f} times"
    for column, cells in result.items():
        gain = cells[row][measure] - cells[other][measure]
        seeds.setdefault(column.partition(" T=")[0], []).append(gain)
    gains = [mean(each) for each in seeds.values()]
    gain, noise = mean(gains), max(gains) - min(gains)
    word = "holds" if gain > finding.factor * noise else "does not hold"
    if finding.factor > 0 and abs(gain) <= noise:
        word = "no difference beyond noise"
    return word, f"{said}, {gain:+.2f} (seeds differ by {noise:.2f})"
