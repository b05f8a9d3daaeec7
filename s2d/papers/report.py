"""The experiments of two papers on the miniatures: what they published, ours, does it hold here?

What was measured is kept as JSON in --out; a later run with the same settings takes it from there.
"""

import json
from statistics import mean
from textwrap import wrap

from ..bench.tables import FORMATS, render, table
from ..files import refuse_other_than_file, staged_file
from ..notices import progress, tell
from .experiments import EXPERIMENTS
from .lab import MARGIN, Lab

WIDTH = 120  # of a line of text


def report(args):
    """Measure what is not known yet, and print each experiment when it is known."""
    names = args.only or [n for n, each in EXPERIMENTS.items() if args.drafts or not each.trained]
    for name in names:
        if EXPERIMENTS[name].trained and not args.drafts:
            raise ValueError(f"{name}: give --drafts, made by python -m s2d.papers train")
        if args.out:
            refuse_other_than_file(args.out / f"{name}.json")
    lab = Lab(args)
    for name in progress(names, "papers: experiments", len(names)):
        print(told(name, measured(lab, name), args.markdown), flush=True)


def measured(lab, name):
    """An experiment's result {column: {row: {measure: value}}}, from --out if it is there."""
    options = "limit rounds max_new_tokens device dtype".split()
    settings = {option: str(getattr(lab.args, option)) for option in options}
    settings["drafts"] = lab.drafts
    file = lab.args.out and lab.args.out / f"{name}.json"
    if file and file.exists():
        kept = json.loads(file.read_text())
        if kept["settings"] != settings:
            raise ValueError(f"{file} is of {kept['settings']}; name another folder")
        return kept["result"]
    tell(f"measuring {name}")
    about = EXPERIMENTS[name]
    result = about.measure(lab, about)
    if file:
        with staged_file(file) as stage:
            stage.write_text(json.dumps({"settings": settings, "result": result}, indent=1))
    return result


def told(name, result, markdown):
    """An experiment as text: title, source, whether its findings hold, and the table."""
    about = EXPERIMENTS[name]
    text = [f"### {about.title} (`{name}`; {about.source})"]
    known = f"{about.about}. " if about.about else ""
    if about.note:
        known += f"Published: {about.note}."
    text += wrap(known, WIDTH)
    for finding in about.findings:
        word, figures = judge(finding, result)
        verdict = f"- {word} here: {finding.claim} ({figures})"
        text += wrap(verdict, WIDTH, subsequent_indent="  ")
    lines = table(result, about.measures, means=True)
    lines[0][0] = " / ".join(about.measures)
    lines[1:1] = [[row, *cells.split("|")] for row, cells in about.published.items()]
    return "\n".join([*text, "", render(lines, markdown), ""])


def judge(finding, result):
    """Whether one Finding holds, and its figures.

    It does if the means over all columns differ by more than MARGIN, or, where columns are seeds,
    by more than the differences of the seeds are apart. If they differ so the other way round, it
    does not hold; in between it is undecided.
    """
    key, columns = finding.measure, list(result.values())
    values = {row: mean(each[row][key] for each in columns) for row in columns[0]}
    values.setdefault("the target alone", 1.0)
    row, other = (max(rows, key=values.get) for rows in (finding.rows, finding.others))
    one, two = (format(values[each], FORMATS[key]) for each in (row, other))
    figures = f"{key} {one} against {two}"
    seeds = dict.fromkeys(column.split()[1] for column in result if column.startswith("seed"))
    if not seeds:
        holds = values[row] > MARGIN * values[other]
        fails = values[other] > MARGIN * values[row]
    else:
        gains = []
        for seed in seeds:
            cells = [each for column, each in result.items() if column.startswith(f"seed {seed} ")]
            gains.append(mean(each[row][key] - each[other][key] for each in cells))
        figures += f"; by seed {', '.join(f'{gain:+.2f}' for gain in gains)}"
        noise = max(gains) - min(gains)
        holds = mean(gains) > noise
        fails = mean(gains) < -noise
    if holds or (finding.no_worse and not fails):
        return "Holds", figures
    return ("Does not hold" if fails else "Undecided"), figures
