"""The last table as a picture: a bar a method, a panel for each target and temperature.

Knows nothing about measuring. matplotlib is imported here only.
"""

from pathlib import Path

from ..files import check_free, staged_file
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
    check_free(file, "picture", lambda old: MARK.encode() in old.read_bytes(), replace=True)
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
    matplotlib = check_plot(file)
    targets, temperatures = (list(dict.fromkeys(part)) for part in zip(*summaries))
    methods = list(dict.fromkeys(name for each in summaries.values() for name in each))
    with matplotlib.rc_context(STYLE):
        wide = 0.09 * max(map(len, methods)) + 3 * len(temperatures)
        high = (0.5 + 0.24 * len(methods)) * len(targets) + 0.3
        figure = matplotlib.figure.Figure((wide, high), layout="constrained")
        how = dict(sharex=True, sharey=True, squeeze=False)
        grid = figure.subplots(len(targets), len(temperatures), **how)
        for (target, temperature), summary in summaries.items():
            axes = grid[targets.index(target)][temperatures.index(temperature)]
            speeds = [row["speedup"] for row in summary.values()]
            colors = [COLORS.get(name.split()[0], OURS) for name in summary]
            bars = axes.barh([methods.index(name) for name in summary], speeds, color=colors)
            axes.bar_label(bars, [f"{speed:.2f}" for speed in speeds], padding=3)
            axes.set_title(f"{target}, T = {temperature:g}")
            axes.margins(x=0.15)  # where the values stand
            axes.set_yticks(range(len(methods)), methods)
            axes.tick_params(length=0, labelbottom=False)
            axes.spines[:].set_visible(False)
        grid[0][0].invert_yaxis()  # the first method on top, in all as they share it
        figure.supxlabel("speedup over the target alone (ar)", fontsize=10)
        with staged_file(file) as stage:
            figure.savefig(stage, format="svg", transparent=True, metadata={"Creator": MARK})
