"""The experiments of two papers on the miniatures: what they published, ours, does it hold here?

What was measured is kept as JSON in the folder --out, from where a later run with the same settings
takes it. Tables, sentences and pictures are made from that alone.
"""

import json
import math
import zlib
from statistics import mean

import torch

from ..fields import read_json
from ..files import staged_file
from ..program import tell
from ..weights import check_device
from . import papers_mcsd, papers_s2d
from .lab import Lab
from .plot import check_plot, write_bars
from .tables import render

EXPERIMENTS = papers_s2d.EXPERIMENTS | papers_mcsd.EXPERIMENTS
DEFAULTS = dict(limit=2, rounds=1, max_new_tokens=48)
EXPERIMENTS = papers_s2d.EXPERIMENTS | papers_mcsd.EXPERIMENTS
DEFAULTS = dict(limit=2, rounds=1, max_new_tokens=48)
FORMATS = {"speedup": ".2f", "mat": ".2f", "layers": ".1f", "accepted": ".0%", "right": ".0%"}
FORMATS |= {"log-probability": ".2f", "µs": ".0f"}


def report(args):
    """Measure what is not there yet, and print each experiment when it is known."""
    args.device = str(check_device(args.device))
    names = chosen(args)
    for folder in filter(None, (args.out, args.plot)):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; --out and --plot take a folder")
        folder.mkdir(parents=True, exist_ok=True)
    known = {name: former(args, name) for name in names}  # before anything is measured
    for name in names if args.plot else ():
        check_plot(args.plot / f"{name}.svg")
    lab = Lab(args)
    for number, name in enumerate(names, 1):
        tell(f"{number} of {len(names)}: {name}")
        result = known[name] or EXPERIMENTS[name].measure(lab)
        print(told(name, result, args.markdown), flush=True)
        if args.out and not known[name]:
            kept = {"experiment": name, "settings": settings_of(args, name), "result": result}
            with staged_file(args.out / f"{name}.json") as stage:
                stage.write_text(json.dumps(kept, indent=1) + "\n")
        if args.plot:
            draw(args.plot / f"{name}.svg", EXPERIMENTS[name], result)


def chosen(args):
    """The names of experiments; ValueError where one lacks what it compares."""
    names = list(dict.fromkeys(args.only or EXPERIMENTS))
    trained = [name for name in names if EXPERIMENTS[name].trained]
    made = "made by python -m s2d.train ablations"
    if trained and not args.drafts:
        if args.only:
            raise ValueError(f"{', '.join(trained)}: give --drafts, {made}")
        tell(f"left out are {', '.join(trained)}: give --drafts, {made}")
        return [name for name in names if name not in trained]
    if trained and not args.drafts.is_dir():
        raise FileNotFoundError(f"there is no {args.drafts}; give --drafts, {made}")
    return names


def settings_of(args, name):
    """What a result depends on, as texts; of the drafts a checksum of their files' checksums."""
    settings = {each: str(getattr(args, each)) for each in (*DEFAULTS, "device", "dtype")}
    settings["threads"] = str(torch.get_num_threads())
    if EXPERIMENTS[name].trained:
        files = sorted(args.drafts.glob("**/*.safetensors"))
        found = b"".join(file.read_bytes() for file in files)
        settings["drafts"] = f"{zlib.crc32(found):08x}"
    return settings


def former(args, name):
    """The result of an experiment in --out; None where there is none.

    ValueError for a file that was not written here, or with other settings.
    """
    file = args.out and args.out / f"{name}.json"
    if not file or not file.exists():
        return None
    if not is_result(name, file):
        raise ValueError(f"{file} is no result that was written here; name another folder")
    found, settings = read_json(file), settings_of(args, name)
    other = [f"{key} {value}" for key, value in found["settings"].items() - settings.items()]
    if other or found["settings"].keys() != settings.keys():
        raise ValueError(
            f"{file} was measured with {', '.join(sorted(other))}; name another folder"
        )
    return found["result"]


def is_result(name, file):
    """Whether ``file`` has a result of that experiment, figures in each cell."""
    found, measures = read_json(file), EXPERIMENTS[name].measures
    if [*found] != ["experiment", "settings", "result"] or found["experiment"] != name:
        return False
    settings, columns = found["settings"], found["result"]
    tables = isinstance(settings, dict) and isinstance(columns, dict) and [*columns.values()]
    if not tables or {*map(type, settings.values())} != {str} or {*map(type, tables)} != {dict}:
        return False
    cells = [cell for rows in tables for cell in rows.values()]
    figures = [cell.get(key) for cell in cells if isinstance(cell, dict) for key in measures]
    alike = all([*rows] == [*tables[0]] for rows in tables)
    return (
        alike
        and len(figures) == len(cells) * len(measures) > 0
        and all(isinstance(figure, float) and math.isfinite(figure) for figure in figures)
    )


def told(name, result, markdown):
    """An experiment as text: title, source, table, and whether its finding holds."""
    about = EXPERIMENTS[name]
    verdict, sentence = about.finding(result)
    heading = f"{'### ' if markdown else ''}{about.title}"
    shows = f"`{name}`: {' / '.join(about.measures)}; {about.source}"
    shows += f"; published: {about.said}" if about.said else ""
    lines = render(table(about, result), markdown)
    return "\n\n".join((heading, shows, lines, f"{verdict}: {sentence}")) + "\n"


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
