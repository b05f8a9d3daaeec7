"""The experiments of two papers on the miniatures: what they published, ours, does it hold here?

What was measured is kept as JSON in --out; a later run with the same settings takes it from there.
"""

import json
import zlib
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from textwrap import wrap

from ..checkpoint.names import WEIGHTS
from ..files import refuse_other_than_file, staged_file
from ..notices import progress, tell
from .experiments import EXPERIMENTS
from .lab import ALONE, Experiment, Finding, Lab
from .tables import FORMATS, Result, render, table

MARGIN = 1.1  # times as large: the speed of one method differs by up to 10 % from run to run
WIDTH = 120  # of a line of text


def report(args: Namespace) -> None:
    """Measure what is not known yet, and print each experiment when it is known."""
    every = [name for name, each in EXPERIMENTS.items() if args.drafts or not each.needs_drafts]
    names = args.only or every
    for name in names:
        if EXPERIMENTS[name].needs_drafts and not args.drafts:
            raise ValueError(f"{name}: give --drafts, made by python -m s2d.bench papers train")
        if args.out:
            refuse_other_than_file(args.out / f"{name}.json")
    lab = Lab(args)
    settings = settings_of(args)
    for name in progress(names, "papers: experiments", len(names)):
        result = measure_once(lab, name, settings)
        print(as_text(name, EXPERIMENTS[name], result, args.markdown), flush=True)


def settings_of(args: Namespace) -> dict[str, str | int]:
    """What a result depends on, with checksums of the miniatures and of the trained drafts."""
    options = "limit rounds max_new_tokens device dtype".split()
    settings = {option: str(getattr(args, option)) for option in options}
    trained = args.drafts.rglob("*.safetensors") if args.drafts else ()
    miniatures = WEIGHTS.glob("mini-*/*.safetensors")
    return settings | {"drafts": checksum_of(trained), "miniatures": checksum_of(miniatures)}


def checksum_of(files: Iterable[Path]) -> int:
    checksum = 0
    for file in sorted(files):
        checksum = zlib.crc32(file.read_bytes(), checksum)
    return checksum


def measure_once(lab: Lab, name: str, settings: dict[str, str | int]) -> Result:
    """The Result of an experiment, from --out if it is there."""
    file = lab.args.out and lab.args.out / f"{name}.json"
    if file and file.exists():
        kept = json.loads(file.read_text())
        if kept["settings"] != settings:
            raise ValueError(f"{file} is of {kept['settings']}; name another folder")
        return kept["result"]
    tell(f"measuring {name}")
    result = EXPERIMENTS[name].measure(lab, EXPERIMENTS[name])
    if file:
        with staged_file(file) as stage:
            stage.write_text(json.dumps({"settings": settings, "result": result}, indent=1))
    return result


def as_text(name: str, experiment: Experiment, result: Result, markdown: bool) -> str:
    """An experiment: title, source, whether its findings hold, and the table."""
    text = [f"### {experiment.title} (`{name}`; {experiment.source})"]
    known = f"{experiment.about}. " if experiment.about else ""
    if experiment.note:
        known += f"Published: {experiment.note}."
    text += wrap(known, WIDTH)
    for finding in experiment.findings:
        word, figures = judge(finding, finding.measure or experiment.measures[0], result)
        text += wrap(f"- {word} here: {finding.claim} ({figures})", WIDTH, subsequent_indent="  ")
    lines = table(result, experiment.measures, means=True)
    lines[0][0] = " / ".join(experiment.measures)
    lines[1:1] = [[row, *cells.split("|")] for row, cells in experiment.published.items()]
    return "\n".join([*text, "", render(lines, markdown), ""])


def judge(finding: Finding, measure: str, result: Result) -> tuple[str, str]:
    """Whether a Finding about a ``measure`` holds, and its figures.

    Compared are the means over all columns. They differ if one is more than MARGIN times as large;
    or, if columns are seeds, if the mean difference is larger than what those of the seeds are
    apart. The finding holds if they differ as it says, and does not hold if they differ the other
    way round; otherwise it is undecided.
    """
    columns = list(result.values())
    values = {row: mean(each[row][measure] for each in columns) for row in columns[0]}
    values.setdefault(ALONE, 1.0)
    row = max(finding.rows, key=values.get)
    other = max(finding.others, key=values.get)
    one = format(values[row], FORMATS[measure])
    two = format(values[other], FORMATS[measure])
    figures = f"{measure} {one} against {two}"
    seeds = dict.fromkeys(column.split()[1] for column in result if column.startswith("seed"))
    if not seeds:
        holds = values[row] > MARGIN * values[other]
        fails = values[other] > MARGIN * values[row]
    else:
        gains = []
        for seed in seeds:
            cells = [each for column, each in result.items() if column.startswith(f"seed {seed} ")]
            gains.append(mean(each[row][measure] - each[other][measure] for each in cells))
        figures += f"; by seed {', '.join(f'{gain:+.2f}' for gain in gains)}"
        noise = max(gains) - min(gains)
        holds = mean(gains) > noise
        fails = mean(gains) < -noise
    if holds or (finding.no_worse and not fails):
        return "Holds", figures
    return ("Does not hold" if fails else "Undecided"), figures
