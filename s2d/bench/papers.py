"""The experiments of two papers on the miniatures: what they published, ours, does it hold here?

What was measured is kept as JSON in the folder --out, from where a later run with the same settings
takes it. Tables, sentences and pictures are made from that alone.
"""

import json
from statistics import mean

import torch

from ..fields import read_json
from ..files import check_free, staged_file
from ..program import tell
from ..weights import check_device
from . import papers_mcsd, papers_s2d
from .lab import Lab
from .plot import check_plot, write_bars
from .tables import render

EXPERIMENTS = papers_s2d.EXPERIMENTS | papers_mcsd.EXPERIMENTS
DEFAULTS = dict(limit=2, rounds=1, max_new_tokens=48)
KEPT = ["experiment", "settings", "result"]  # in a file of --out
SETTINGS = "drafts limit rounds max_new_tokens device dtype".split()
FORMATS = {"speedup": ".2f", "mat": ".2f", "accepted": ".0%", "right": ".0%"}
FORMATS |= {"log-probability": ".2f", "µs": ".0f"}


def report(args):
    """Measure what is not there yet, and print each experiment when it is known."""
    check_device(args.device)
    names = list(dict.fromkeys(args.only or EXPERIMENTS))
    trained = [name for name in names if EXPERIMENTS[name].trained and not args.drafts]
    if trained:
        without = f"{', '.join(trained)}: give --drafts, made by python -m s2d.train ablations"
        if args.only:
            raise ValueError(without)
        tell(f"left out are {without}")
    names = [name for name in names if name not in trained]
    for folder in filter(None, (args.out, args.plot)):
        folder.mkdir(parents=True, exist_ok=True)
    for name in names:  # what is in the way is told before anything is measured
        if args.out:
            former(args, args.out / f"{name}.json")
        if args.plot:
            check_plot(args.plot / f"{name}.svg")
    lab = Lab(args)
    for number, name in enumerate(names, 1):
        tell(f"{number} of {len(names)}: {name}")
        result = measured(args, name, lab)
        print(told(name, result, args.markdown), flush=True)
        if args.plot:
            draw(args.plot / f"{name}.svg", EXPERIMENTS[name], result)


def settings_of(args):
    """What a measurement depends on, as texts."""
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    return settings | {"threads": str(torch.get_num_threads())}


def former(args, file):
    """The result in ``file``; None where there is none. ValueError for one of other settings."""
    if not file.exists():
        return None
    check_free(file, "result", lambda old: KEPT == [*read_json(old)], replace=True)
    found = read_json(file)
    now, then = settings_of(args).items(), found["settings"].items()
    changed = [f"{name} {value}" for name, value in then - now]
    if changed:
        other = f"{file} was measured with {', '.join(sorted(changed))}"
        raise ValueError(f"{other}; name another folder")
    return found["result"]


def measured(args, name, lab):
    """The result of an experiment: the one in --out, else measured now and written there."""
    file = args.out and args.out / f"{name}.json"
    result = former(args, file) if file else None
    if result is None:
        result = EXPERIMENTS[name].measure(lab)
        if file:
            with staged_file(file) as stage:
                kept = dict(zip(KEPT, (name, settings_of(args), result)))
                stage.write_text(json.dumps(kept, indent=1) + "\n")
    return result


def told(name, result, markdown):
    """An experiment as text: title, source, table, and whether its finding holds."""
    about = EXPERIMENTS[name]
    holds, sentence = about.finding(result)
    heading = f"{'### ' if markdown else ''}{about.title}"
    shows = f"`{name}`: {' / '.join(about.measures)}; {about.source}"
    shows += f"; published: {about.said}" if about.said else ""
    lines = render(table(about, result), markdown)
    return "\n\n".join((heading, shows, lines, f"{about.verdicts[holds]}: {sentence}")) + "\n"


def table(about, result):
    """Published rows, then ours: rows of text, the mean over columns last."""
    lines = [["", *result, "mean"]]
    for row, cells in about.published.items():
        lines.append([row, *cells.split("|")])
    for row in next(iter(result.values())):
        cells = [column[row] for column in result.values()]
        cells.append({key: mean(cell[key] for cell in cells) for key in about.measures})
        lines.append([row, *(shown(about, cell) for cell in cells)])
    return lines


def shown(about, cell):
    return " / ".join(format(cell[key], FORMATS[key]) for key in about.measures)


def draw(file, about, result):
    """A panel a column, a bar a row: the first of the measures."""
    key = about.measures[0]
    panels = [
        (column, {row: cell[key] for row, cell in rows.items()}) for column, rows in result.items()
    ]
    write_bars(file, [panels], f"{about.title}: {key}", FORMATS[key])
