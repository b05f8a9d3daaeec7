"""A result as a picture: a panel for each column, a bar for each row. matplotlib is needed here."""

from pathlib import Path

from ..files import staged_file
from .tables import Result

TEXT = "#808080"  # is read on a light and on a dark background
COLORS = {"ar": TEXT, "transformers": "#d98032"}  # by a row's first word; others are blue
STYLE = {"svg.fonttype": "none", "font.size": 10, "axes.titlesize": 10, "text.color": TEXT}
STYLE |= dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), TEXT)


def write_plot(file: Path, result: Result, across: int) -> None:
    """Write the speedups of a ``result`` to an SVG file, ``across`` panels wide."""
    import matplotlib.figure

    names = list(dict.fromkeys(row for column in result.values() for row in column))
    down = -(-len(result) // across)
    with matplotlib.rc_context(STYLE):
        width = 0.09 * max(map(len, names)) + 3 * across
        height = (0.5 + 0.24 * len(names)) * down + 0.3
        figure = matplotlib.figure.Figure((width, height), layout="constrained")
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        for axes, (title, column) in zip(grid.flat, result.items()):
            values = [cell["speedup"] for cell in column.values()]
            colors = [COLORS.get(name.split()[0], "#4a90d9") for name in column]
            bars = axes.barh([names.index(name) for name in column], values, color=colors)
            axes.bar_label(bars, fmt="%.2f", padding=3)
            axes.set_title(title)
            axes.margins(x=0.15)  # where the values stand
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(length=0, labelbottom=False)
            axes.spines[:].set_visible(False)
        grid[0][0].invert_yaxis()  # the first row on top, in all as they share it
        figure.supxlabel("speedup over the target alone (ar)", fontsize=10)
        with staged_file(file) as stage:
            figure.savefig(stage, format="svg", transparent=True)
