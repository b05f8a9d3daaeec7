"""Tables, a picture and JSON of what was measured."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from math import ceil
from pathlib import Path
from platform import platform, python_version
from subprocess import run
from typing import Any

import torch

from .. import __version__
from ..checkpoint.files import staged
from ..cli.program import name_processor
from ..cli.terminal import draws_anew
from ..options import Options
from ..pair.settings import describe
from .figures import Column, Difference, Record, by_method, make_column, stats_of

PACKAGES = "torch", "transformers", "numpy", "safetensors", "sentencepiece"
MEASURES = "speedup", "mat", "of best exit"
LEGEND = "speedup / mean accepted tokens / speedup divided by the best single exit's"


@dataclass(frozen=True)
class Comparison:
    """What methods did in all rounds, on one target at one temperature. Printed, it is tables."""

    title: str
    records: list[Record]
    options: dict[str, Options]  # of our methods; each answer has a seed of its own
    models: dict[str, Any] = field(default_factory=dict)  # what they were

    @cached_property
    def by_group(self) -> dict[str, Column]:
        """Columns are the groups of tasks and "overall", and rows are the methods."""
        columns = {}
        groups = dict.fromkeys(record.question["group"] for record in self.records)
        for group in (*groups, "overall"):
            inside = [r for r in self.records if group in (r.question["group"], "overall")]
            columns[group] = make_column(inside, self.options)
        return columns

    @cached_property
    def acceptance(self) -> dict[str, dict[str, Any]]:
        """{method that drafts: what was accepted}, see ``Stats.acceptance``."""
        rows = by_method(self.records)
        drafting = [method for method, options in self.options.items() if options.exits]
        return {method: stats_of(rows[method]).acceptance() for method in drafting}

    def different_from(self, expected: str) -> dict[str, list[Difference]]:
        """{lossless method: where its answers differ from those of the ``expected`` one}.

        Above T = 0 rejection sampling draws another text than others, and is left out. What is
        lossless bit for bit is compared with the target alone in the same way, if that is there.
        """
        rows = by_method(self.records)
        alone = {each.decoder: name for name, each in self.options.items() if each.method == "ar"}
        found = {}
        for method, options in self.options.items():
            is_exact = rows[method][0].turns[0].generation.exact
            other = alone.get(options.decoder, expected) if expected == "ar" else expected
            if method != other and is_exact and not draws_anew(options):
                pairs = [one.first_difference(own) for one, own in zip(rows[other], rows[method])]
                found[method] = [each for each in pairs if each is not None]
        return found

    def __str__(self) -> str:
        text = table(f"{self.title}: {LEGEND}", self.by_group, MEASURES)
        if self.acceptance:
            text += f"\n{render(acceptance_table(self.acceptance))}\n"
        return text

    def as_json(self) -> dict[str, Any]:
        """What is printed, what it came from, and each answer of each round."""
        options = {method: describe(each) for method, each in self.options.items()}
        answers = []
        for record in self.records:
            turns = [turn._asdict() for turn in record.turns]
            for turn in turns:
                made = turn.pop("generation")
                turn["accept_lengths"] = made and made.stats.accept_lengths
            answers.append(record._asdict() | {"turns": turns})
        by_group = {group: column_as_json(column) for group, column in self.by_group.items()}
        tables = {"by_group": by_group, "acceptance": self.acceptance}
        about = describe_machine() | {"models": self.models, "rounds": self.records[-1].round}
        return {"title": self.title, "options": options, **about, **tables, "answers": answers}


def describe_machine() -> dict[str, Any]:
    """Where figures come from: the commit, the processor, threads and versions."""
    versions = {name: version(name) for name in PACKAGES if name in sys.modules}
    versions["s2d"] = __version__
    machine = {"processor": name_processor(), "system": platform(), "versions": versions}
    machine |= {"python": python_version(), "threads": torch.get_num_threads()}
    describe = "git describe --always --dirty --abbrev=40 --exclude='*'"  # no text without git
    commit = run(describe, shell=True, cwd=Path(__file__).parent, capture_output=True).stdout
    return {"commit": commit.decode().strip(), "machine": machine}


def column_as_json(column: Column) -> dict[str, Any]:
    rows = {}
    for method, cell in column.items():
        rows[method] = {key: {"value": f.value, "spread": f.spread} for key, f in cell.items()}
    return rows


def table(legend: str, columns: Mapping[str, Column], measures: Sequence[str]) -> str:
    """A ``legend`` and the ``columns``: cells show those of the ``measures`` that they have."""
    counts = [len(column["ar"]["speedup"].groups) for column in columns.values()]
    lines = [["", *(f"{name} ({count})" for name, count in zip(columns, counts))]]
    for row in next(iter(columns.values())):
        line = [row]
        for column in columns.values():
            cell = column.get(row, {})
            line.append(" / ".join(f"{cell[key]:.2f}" for key in measures if key in cell))
        lines.append(line)
    return f"{legend}, ± standard error (of so many questions)\n\n{render(lines)}\n"


def acceptance_table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The share of drafted tokens that were accepted by position; and what the exits did."""
    lines = [["", "accepted at 1, 2, ...", "by exit: asked / drafted / accepted"]]
    for method, accepted in found.items():
        rates = " ".join(f"{rate:.0%}" for rate in accepted["rates_per_pos"])
        exits = []
        for layer, counts in accepted["per_exit"].items():
            exits.append(f"{layer}: {' / '.join(map(str, counts.values()))}")
        lines.append([method, rates, "; ".join(exits)])
    return lines


def render(lines: list[list[str]]) -> str:
    """A table in markdown, whose columns are aligned."""
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def write_plot(file: Path, columns: dict[str, Column], across: int) -> None:
    """Speedups as bars, a panel for each column, ``across`` of them in a line. By matplotlib."""
    from matplotlib.figure import Figure as Picture

    down = ceil(len(columns) / across)
    size = (4 * across, down * (1 + len(next(iter(columns.values()))) / 4))
    picture = Picture(size, layout="constrained")
    grid = picture.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes, (title, column) in zip(grid.flat, columns.items()):
        speedups = [cell["speedup"] for cell in column.values()]
        spreads = [each.spread or 0.0 for each in speedups]
        bars = axes.barh(list(column), [each.value for each in speedups], xerr=spreads)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.margins(x=0.2)  # where the values stand
        axes.set_title(title)
    grid[0][0].invert_yaxis()  # the first row on top, in all panels as they share it
    picture.supxlabel("speedup over the target alone (ar)")
    with staged(file) as stage:
        picture.savefig(stage)
