"""The pictures of the lesson. Every number in them is given by the cell that shows them."""

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..stats import Step
from ..tree import Tree

COLORS = "#00707a", "#9a5b00", "#8a2a8a", "#2e7d1f", "#2b55c4", "#b3261e"  # of exits, in order
NEUTRAL = "#222222", "#8a8a8a"  # of what is no exit, target or draft
TARGET = "#707070"  # what the target wrote itself
P = "#2b6cb0"
Q = "#c77a12"
SIDE = 0.92  # of a box; they are 1 apart
APART = 1.25  # levels of a tree
CENTERED = dict(horizontalalignment="center", verticalalignment="center", fontsize=8)
Texts = Callable[[int], str]  # a token -> what stands in its box


class Picture:
    """A figure that a notebook shows if it is the value of a cell's last line."""

    def __init__(self, figure: Figure, words: str) -> None:
        """``words`` say what there is to see, for those who do not see it."""
        self.figure = figure
        self.words = words

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=80, metadata={"Software": None})
        return file.getvalue()

    def __repr__(self) -> str:
        return self.words


def new_axes(width: float, height: float) -> Axes:
    """Axes without a frame, so many inches large."""
    axes = Figure((width, height), layout="constrained").subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def color_of(exit_layer: int, exits: Sequence[int]) -> str:
    """The colour of an exit by its place among ``exits``, as on the page of an answer (trace/)."""
    return COLORS[list(exits).index(exit_layer) % len(COLORS)]


def draw_box(axes: Axes, x: float, y: float, text: str, color: str, filled: bool) -> None:
    face = color if filled else "white"
    axes.add_patch(Rectangle((x, y), SIDE, 0.8, facecolor=face, edgecolor=color, linewidth=1.3))
    axes.text(x + SIDE / 2, y + 0.38, text, color="white" if filled else color, **CENTERED)


def draw_grid(
    values: np.ndarray, texts: np.ndarray, columns: Sequence[str], rows: Sequence[str], colors: str
) -> Axes:
    """A table of cells, coloured by their ``values`` from 0 to 1; NaN leaves a cell empty."""
    axes = new_axes(0.4 * len(columns) + 1.1, 0.33 * len(rows) + 0.8)
    places = range(len(columns)), range(len(rows))
    axes.pcolormesh(*places, values, cmap=colors, vmin=0, vmax=1.3, edgecolors="white")
    for (row, column), text in np.ndenumerate(texts):
        dark = colors != "Greys" or values[row, column] >= 0.8
        axes.text(column, row, text, color="white" if dark else "black", **CENTERED)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns, rotation=60, fontsize=8)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes


def plot_pass_times(counts: Sequence[int], seconds: Sequence[float]) -> Picture:
    """Seconds of one pass over each of ``counts`` tokens, next to as many passes over one."""
    axes = new_axes(5.5, 2.6)
    one_by_one = [1000 * seconds[0] * count for count in counts]
    axes.plot(counts, one_by_one, "--", color="#999999", label="one pass for each token")
    axes.plot(counts, [1000 * each for each in seconds], "o-", color=P, label="one pass over all")
    axes.set(xlabel="tokens", ylabel="milliseconds", ylim=(0, None), xticks=counts)
    axes.legend(frameon=False)
    return Picture(axes.figure, "The time of one pass over some tokens, and of a pass for each.")


def draw_chains(steps: Sequence[Step], piece: Texts) -> Picture:
    """A row for each step: the chain that was drafted, what of it was accepted, the bonus token."""
    width = max(len(step.tree.tokens) for step in steps)  # node 0 is the end of the context
    axes = new_axes(0.75 * width, 0.33 * len(steps) + 0.4)
    for down, step in enumerate(steps):
        for node, token in enumerate(step.tree.tokens[1:], start=1):
            draw_box(axes, node - 1, -down, piece(token), COLORS[0], filled=node in step.accepted)
        if len(step.tokens) > len(step.accepted):
            after = len(step.tree.tokens) - 1
            draw_box(axes, after, -down, piece(step.tokens[-1]), TARGET, filled=True)
    axes.text(0, 1.1, "drafted", color=COLORS[0], fontsize=9, weight="bold")
    axes.text(width - 1, 1.1, "target", color=TARGET, fontsize=9, weight="bold")
    axes.set(xlim=(-0.1, width), ylim=(0.9 - len(steps), 1.6))
    axes.axis("off")
    accepted = ", ".join(str(len(step.accepted)) for step in steps)
    return Picture(axes.figure, f"Steps and their tokens. Accepted: {accepted}.")


def plot_lengths(
    lengths: Sequence[int], measured: dict[str, list[float]], formula: dict[str, list[float]]
) -> Picture:
    """Tokens per pass by the length of the chain: ``measured`` ones, and those of a formula."""
    axes = new_axes(5.5, 2.8)
    for color, (name, values) in zip(NEUTRAL, measured.items()):
        axes.plot(lengths, values, "o-", color=color, label=name, markersize=4)
    for color, (name, values) in zip(NEUTRAL, formula.items()):
        axes.plot(lengths, values, "--", color=color, label=name)
    axes.set(xlabel="drafted tokens k", ylabel="tokens per pass", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return Picture(axes.figure, "Tokens per pass by the length of the chain.")


def draw_acceptance(
    p: Sequence[float], q: Sequence[float], residual: Sequence[float], rejected: float
) -> Picture:
    """Which part of p comes from accepted tokens, and which from the ``residual``.

    ``rejected``: the probability that the drafted token is rejected.
    """
    axes = new_axes(6, 2.8)
    tokens = np.arange(len(p))
    p = np.asarray(p)
    q = np.asarray(q)
    accepted = np.minimum(p, q)
    added = rejected * np.asarray(residual)
    often = q > p  # drafted too often
    more = (q - p)[often]
    hatched = dict(color="none", edgecolor=Q, hatch="///", label="drafted, rejected")
    axes.bar(tokens[often], more, 0.75, bottom=accepted[often], **hatched)
    axes.bar(tokens, accepted, 0.75, color=COLORS[0], label="drafted, accepted")
    axes.bar(tokens, added, 0.75, bottom=accepted, color="#cfcfcf", label="from the residual")
    edges = np.arange(len(p) + 1) - 0.5
    axes.stairs(p, edges, color="black", linewidth=1.4, label="p")
    axes.set(xticks=tokens, xlabel="token", ylabel="probability")
    axes.legend(frameon=False, fontsize=8)
    return Picture(axes.figure, "Accepted tokens and the residual add up to p.")


def draw_race(
    names: Sequence[str], p: Sequence[float], q: Sequence[float], noise: Sequence[float]
) -> Picture:
    """p and q of some tokens, their noise e, and p / e and q / √e: the largest wins."""
    figure = Figure((8.5, 2.6), layout="constrained")
    probs, noises, scores = figure.subplots(1, 3)
    places = np.arange(len(names))
    own = np.divide(p, noise)
    guess = np.divide(q, np.sqrt(noise))
    probs.bar(places - 0.2, p, 0.38, color=P, label="target: p")
    probs.bar(places + 0.2, q, 0.38, color=Q, label="draft: q")
    noises.bar(places, noise, 0.5, color="#bbbbbb", label="noise: e")
    scores.bar(places - 0.2, own / own.max(), 0.38, color=P, label="target: p / e")
    scores.bar(places + 0.2, guess / guess.max(), 0.38, color=Q, label="draft: q / √e")
    scores.set_yticks([0, 1], ["0", "largest"])
    for axes in (probs, noises, scores):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(places, names, rotation=60, fontsize=8)
        axes.legend(frameon=False, fontsize=8)
    return Picture(figure, "Probabilities, noise, and scores of some tokens.")


def draw_confidences(
    confidences: Sequence[Sequence[float]],
    exits: Sequence[int],
    thresholds: Sequence[float],
    chosen: Sequence[int],
    names: Sequence[str],
) -> Picture:
    """What each exit says at some positions; a frame shows the one that drafts.

    Args:
        confidences: a row for each exit, a column for each position.
        chosen: the exit that drafts, by position.
        names: of the tokens, by position.
    """
    values = np.array(confidences)
    shown = np.vectorize(lambda value: "1" if value >= 0.995 else f"{value:.2f}"[1:])(values)
    rows = [f"exit {each}, threshold {own}" for each, own in zip(exits[:-1], thresholds)]
    axes = draw_grid(values, shown, names, [*rows, f"exit {exits[-1]}, the last"], "Greys")
    axes.invert_yaxis()
    for column, exit_layer in enumerate(chosen):
        corner = (column - 0.46, list(exits).index(exit_layer) - 0.46)
        color = color_of(exit_layer, exits)
        frame = Rectangle(corner, SIDE, SIDE, fill=False, linewidth=2.6, edgecolor=color)
        axes.add_patch(frame)
    return Picture(axes.figure, f"Confidences; the exits that draft are {list(chosen)}.")


def draw_catch_up(
    reads: Sequence[tuple[int, int, int]],
    exits: Sequence[int],
    positions: range,
    names: Sequence[str],
) -> Picture:
    """In which of the draft's predictions each segment of layers read each position.

    ``reads``: exit, first position, and end of what was read, in the order of time. A position that
    was rolled back is read again; the last time counts.
    """
    seen = np.full((len(exits), positions.stop), np.nan)
    prediction = 0
    for exit_layer, start, end in reads:
        if exit_layer == exits[0]:  # with which each prediction begins
            prediction += 1
        seen[list(exits).index(exit_layer), start : min(end, positions.stop)] = prediction
    seen = seen[:, positions.start :]
    texts = np.vectorize(lambda each: "" if np.isnan(each) else f"{each:.0f}")(seen)
    first, last = np.nanmin(seen), np.nanmax(seen)
    rows = [segment_name(start, end) for start, end in zip([0, *exits[:-1]], exits)]
    axes = draw_grid((seen - first) / max(1, last - first), texts, names, rows, "viridis")
    return Picture(axes.figure, "In which prediction each segment of layers read each token.")


def segment_name(start: int, end: int) -> str:
    """Layers start..end-1, counted from 1."""
    return f"layer {end}" if end == start + 1 else f"layers {start + 1}-{end}"


def draw_tree(tree: Tree, accepted: Sequence[int], exits: Sequence[int], piece: Texts) -> Picture:
    """The tree that the target checked, in the colours of the exits; accepted nodes are filled."""
    heights = {}
    waiting = tree.children(0)[::-1]
    leaves = 0
    while waiting:
        node = waiting.pop()
        heights[node] = leaves
        children = tree.children(node)
        leaves += not children
        waiting += children[::-1]
    width = APART * tree.depth
    axes = new_axes(1.1 * width, 0.3 * leaves + 0.4)
    for node, parent in list(enumerate(tree.parents))[1:]:
        left = APART * (tree.depths[node] - 1)
        down = heights[node]
        from_left = left - APART + SIDE
        from_down = heights.get(parent, 0)
        axes.plot([from_left, left], [0.4 - from_down, 0.4 - down], color="#aaaaaa", linewidth=1)
        color = color_of(tree.exit_layers[node], exits)
        text = f"{node}: {piece(tree.tokens[node])}"
        draw_box(axes, left, -down, text, color, filled=node in accepted)
    axes.set(xlim=(SIDE - APART, width), ylim=(0.8 - leaves, 1))
    axes.axis("off")
    return Picture(
        axes.figure, f"A tree of {len(tree.tokens) - 1} nodes. Accepted: {list(accepted)}."
    )


def draw_mask(mask: np.ndarray) -> Picture:
    """Which node (row) attends to which (column)."""
    axes = new_axes(3.4, 3.4)
    axes.imshow(mask, cmap="Blues", vmax=1.4, interpolation="nearest")
    nodes = range(len(mask))
    axes.set_xticks(nodes, nodes, fontsize=7)
    axes.set_yticks(nodes, nodes, fontsize=7)
    axes.set(xlabel="node that is attended to", ylabel="node that attends")
    return Picture(axes.figure, "The ancestor mask of the tree.")
