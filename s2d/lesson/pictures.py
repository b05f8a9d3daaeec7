"""The pictures of the lesson. Every number in them is given by the cell that shows them."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..stats import Step
from ..trace.colors import COLORS, SHADES, color_exits
from ..tree import Node, Tree

DRAFT = COLORS[0].light
INK, FAINT, LINE, P, Q = (SHADES[name][0] for name in ("ink", "faint", "line", "p", "q"))
SIDE = 0.92  # of a box; boxes are 1 apart
TOKEN = 0.78, 0.33  # inches, the size of a box
NUMBER = 0.4, 0.33
CENTERED = dict(fontsize=8, ha="center", va="center")
PLAIN = dict(frameon=False, fontsize=8)  # of a legend
SVG = {"svg.fonttype": "none", "svg.hashsalt": "s2d"}  # a text stays a text; equal names of parts
Piece = Callable[[int], str]  # a token -> what stands in its box
Numbers = Sequence[float]
Names = Sequence[str]


@dataclass(repr=False)
class Picture:
    """An SVG that a notebook shows. ``words`` say what there is to see, where nobody sees it."""

    axes: Axes
    words: str

    def _repr_svg_(self) -> str:
        file = io.StringIO()
        about = {"Title": self.words, "Date": None, "Creator": None}
        with matplotlib.rc_context(SVG):
            self.axes.figure.savefig(file, format="svg", metadata=about)
        return " ".join(file.getvalue().split())  # in one line, as a notebook repeats its indent

    def __repr__(self) -> str:
        return self.words


def new_axes(width: float, height: float) -> Axes:
    """Axes of a figure that is so many inches large."""
    axes = Figure((width, height), layout="constrained").subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


class Box(NamedTuple):
    """A text in a frame, in a column from the left and a row from the top."""

    column: float
    row: int
    text: str
    kind: str  # what the legend says; "" if nothing
    face: str | tuple  # a colour; if it is that of the edge, the text is white
    edge: str


def draw_boxes(boxes: list[Box], inches: tuple[float, float], room: float = 0.1) -> Axes:
    """Boxes of so many ``inches``, with ``room`` for names at the left, above a legend."""
    width = max(box.column for box in boxes) + 1
    height = max(box.row for box in boxes) + 1
    axes = new_axes(inches[0] * width + room, inches[1] * height + 0.9)
    for column, row, text, _, face, edge in boxes:
        frame = Rectangle((column, row), SIDE, 0.8, facecolor=face, edgecolor=edge, linewidth=1.5)
        axes.add_patch(frame)
        ink = "white" if face == edge else INK
        axes.text(column + SIDE / 2, row + 0.42, text, color=ink, **CENTERED)
    axes.set(xlim=(-0.1, width), ylim=(height, -0.2), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    kinds = {box.kind: box for box in boxes if box.kind}
    samples = [Patch(facecolor=kinds[kind].face, edgecolor=kinds[kind].edge) for kind in kinds]
    axes.figure.legend(samples, kinds, loc="outside lower left", ncols=2, **PLAIN)
    return axes


def plot_curves(
    x: Sequence[int], solid: dict[str, list], dashed: dict[str, list], names: tuple[str, str]
) -> Picture:
    """Curves over ``x`` by their labels. ``names``: of x and of what the curves show."""
    axes = new_axes(width=5.5, height=2.8)
    for style, curves in (("o-", solid), ("--", dashed)):
        for color, (label, values) in zip((P, Q), curves.items()):
            axes.plot(x, values, style, color=color, label=label, markersize=4)
    axes.set(xlabel=names[0], ylabel=names[1], ylim=(0, None), xticks=x)
    axes.legend(**PLAIN)
    return Picture(axes, f"Curves of {names[1]} by {names[0]}.")


def draw_chains(steps: Sequence[Step], piece: Piece) -> Picture:
    """A row for each step: the chain that was drafted, what of it was accepted, the bonus token."""
    boxes = []
    for row, step in enumerate(steps):
        nodes = step.tree.nodes[1:]  # the first one is the end of the context
        for column, node in enumerate(nodes):
            verdict = "accepted" if node in step.accepted else "rejected"
            face = DRAFT if verdict == "accepted" else "white"
            boxes.append(Box(column, row, piece(node.token), f"drafted, {verdict}", face, DRAFT))
        bonus = piece(step.tokens[-1])
        boxes.append(Box(len(nodes), row, bonus, "the target's own token", FAINT, FAINT))
    axes = draw_boxes(boxes, TOKEN)
    counts = [len(step.accepted) for step in steps]
    return Picture(axes, f"Accepted tokens of each step: {counts}.")


def draw_acceptance(p: Numbers, q: Numbers, residual: Numbers, rejected: float) -> Picture:
    """What of p is accepted and, with probability ``rejected``, comes from the ``residual``."""
    axes = new_axes(width=6, height=2.8)
    tokens = np.arange(len(p))
    accepted = np.minimum(p, q)
    added = rejected * np.asarray(residual)
    hatched = dict(color="none", edgecolor=Q, hatch="///", linewidth=0)
    axes.bar(tokens, q - accepted, 0.75, bottom=accepted, label="drafted, rejected", **hatched)
    axes.bar(tokens, accepted, 0.75, color=DRAFT, label="drafted, accepted")
    axes.bar(tokens, added, 0.75, bottom=accepted, color=LINE, label="from the residual")
    axes.stairs(p, np.arange(len(p) + 1) - 0.5, color=INK, linewidth=1.4, label="p")
    axes.set(xticks=tokens, xlabel="token", ylabel="probability")
    axes.legend(**PLAIN)
    return Picture(axes, "What is accepted and what is from the residual add up to p.")


def draw_numbers(
    rows: dict[str, Numbers], columns: Names, framed: dict[str, Sequence[int]]
) -> Picture:
    """Rows of numbers by their names. The larger a number is in its row, the darker is its box.

    ``framed``: by the name of a row, the columns that have a frame.
    """
    boxes = []
    for row, (name, numbers) in enumerate(rows.items()):
        for column, number in enumerate(numbers):
            face = str(np.interp(number, [min(numbers), max(numbers)], [1.0, 0.5]))  # a grey
            edge = INK if column in framed.get(name, []) else "white"
            boxes.append(Box(column, row, str(number).lstrip("0"), "", face, edge))
    axes = draw_boxes(boxes, NUMBER, room=1.2)
    axes.set_xticks(np.arange(len(columns)) + SIDE / 2, columns, rotation=60, fontsize=8)
    axes.set_yticks(np.arange(len(rows)) + 0.4, list(rows))
    axes.tick_params(length=0)
    return Picture(axes, f"Numbers: {rows}. Columns with a frame: {framed}.")


def draw_catch_up(
    reads: list[tuple[int, int, int]], exits: Sequence[int], positions: range, names: Names
) -> Picture:
    """In which of the draft's predictions each segment of layers read each position.

    ``reads``: exit, first position, and end of what was read, in the order of time. A position that
    was rolled back is read again; the last time counts.
    """
    seen = np.zeros((len(exits), positions.stop), dtype=int)
    prediction = 0
    for exit_layer, start, end in reads:
        prediction += exit_layer == exits[0]  # every prediction begins with it
        seen[exits.index(exit_layer), start:end] = prediction
    segments = [f"segment of exit {each}" for each in exits]
    rows = dict(zip(segments, seen[:, positions.start :].tolist()))
    return draw_numbers(rows, names, framed={})


def draw_tree(tree: Tree, accepted: list[Node], exits: Sequence[int], piece: Piece) -> Picture:
    """The tree that the target checked, in the colours of the exits; accepted nodes are filled."""
    colors = color_exits(exits)  # as on the page of an answer
    number = {node: i for i, node in enumerate(tree.nodes)}
    rows: dict[Node, int] = {}  # the row it is drawn in
    row = 0
    for node in sorted(tree.nodes, key=lambda node: [number[each] for each in node.path]):
        rows[node] = row
        row += not tree.children(node)  # after a leaf, a new row begins
    root = f"0: {piece(tree.root.token)}"
    boxes = {tree.root: Box(0, 0, root, "the context's last token", FAINT, FAINT)}
    for node in tree.nodes[1:]:
        edge = colors[node.exit_layer].light
        verdict = "accepted" if node in accepted else "rejected"
        face = edge if verdict == "accepted" else "white"
        text = f"{number[node]}: {piece(node.token)}"
        kind = f"exit {node.exit_layer}, {verdict}"
        boxes[node] = Box(1.3 * node.depth, rows[node], text, kind, face, edge)
    axes = draw_boxes(list(boxes.values()), TOKEN)
    for node in tree.nodes[1:]:
        x = [boxes[node.parent].column + SIDE, boxes[node].column]
        axes.plot(x, [rows[node.parent] + 0.4, rows[node] + 0.4], color=FAINT, linewidth=0.8)
    return Picture(axes, f"A drafted tree. Accepted nodes: {[number[each] for each in accepted]}.")
