"""The last table as a picture: a bar a method, a panel for each target and temperature.

Knows nothing about measuring. matplotlib is imported here only.
"""

from pathlib import Path

from ..files import staged_file
from ..program import optional

MARK = "s2d.bench"  # in every file written here
TEXT = "#808080"  # is read on light and on dark ground
COLORS = {"ar": TEXT, "transformers": "#d98032"}  # by a name's first word; all others:
OURS = "#4a90d9"
STYLE = {"svg.fonttype": "none", "font.size": 10, "axes.titlesize": 10, "text.color": TEXT}
STYLE |= dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), TEXT)


def check_plot(file):
    """matplotlib. ValueError without it, or where ``file`` is none to write: ask early."""
    for module in ("matplotlib.figure", "matplotlib"):
        matplotlib = optional(module, "matplotlib==3.11.2")
    if Path(file).suffix != ".svg":
        raise ValueError(f"--plot writes SVG: {file} has to end in .svg")
    return matplotlib


def write_lines(file, batches, ratios):
    """{method: speeds over ar's one by one} at each of ``batches`` -> an SVG file, a line each."""
    matplotlib = check_plot(file)
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure((6, 4), layout="constrained")
        axes = figure.subplots()
        for name, row in ratios.items():
            color = COLORS.get(name.split()[0])
            axes.plot(range(len(batches)), row, marker="o", label=name, color=color)
        axes.set_xticks(range(len(batches)), batches)
        axes.set_xlabel("prompts at once")
        axes.set_ylabel("tokens a second, over ar one by one")
        axes.spines[:].set_color(TEXT)
        axes.legend(frameon=False)
        with staged_file(file) as stage:
            figure.savefig(stage, format="svg", transparent=True, metadata={"Creator": MARK})


def write_plot(file, summaries):
    """{(target, temperature): summary}, as tables.summarise makes them -> an SVG file."""
    targets, temperatures = (list(dict.fromkeys(part)) for part in zip(*summaries))
    panels = [
        [
            (
                f"{target}, T = {temperature:g}",
                {name: row["speedup"] for name, row in summaries[target, temperature].items()},
            )
            for temperature in temperatures
            if (target, temperature) in summaries
        ]
        for target in targets
    ]
    write_bars(file, panels, "speedup over the target alone (ar)")


def write_bars(file, panels, label, form=".2f"):
    """Rows of panels, (title, {name: value}) each -> an SVG file, a bar a name."""
    matplotlib = check_plot(file)
    names = list(dict.fromkeys(name for row in panels for _, bars in row for name in bars))
    rows, columns = len(panels), max(map(len, panels))
    with matplotlib.rc_context(STYLE):
        wide = 0.09 * max(map(len, names)) + 3 * columns
        high = (0.5 + 0.24 * len(names)) * rows + 0.3
        figure = matplotlib.figure.Figure((wide, high), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, (title, values) in zip(grid.flat, [panel for row in panels for panel in row]):
            colors = [COLORS.get(name.split()[0], OURS) for name in values]
            bars = axes.barh([names.index(name) for name in values], values.values(), color=colors)
            axes.bar_label(bars, [format(value, form) for value in values.values()], padding=3)
            axes.set_title(title)
            axes.margins(x=0.15)  # where the values stand
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(length=0, labelbottom=False)
            axes.spines[:].set_visible(False)
        grid[0][0].invert_yaxis()  # the first method on top, in all as they share it
        figure.supxlabel(label, fontsize=10)
        with staged_file(file) as stage:
            figure.savefig(stage, format="svg", transparent=True, metadata={"Creator": MARK})
