"""The colours of exits: the same on a terminal, on the page of an answer and in the picture."""

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple


class Color(NamedTuple):
    """A colour as a terminal and as a style sheet name it."""

    name: str  # of its class in a style sheet
    ansi: int  # of a terminal's escape sequence
    light: str  # on a light background
    dark: str  # on a dark background
    line: str  # the style of the line under a text, for those who do not see the colour


COLORS = (
    Color("teal", 36, "#00707a", "#5fd0da", "solid"),
    Color("orange", 33, "#9a5b00", "#f0b35a", "dashed"),
    Color("purple", 35, "#8a2a8a", "#e08ae0", "dotted"),
    Color("green", 32, "#2e7d1f", "#8fd97f", "double"),
    Color("blue", 34, "#2b55c4", "#8fb0ff", "double"),
    Color("red", 31, "#b3261e", "#ff9a92", "double"),
)


def color_exits(own: Sequence[int], used: Sequence[int]) -> dict[int, Color]:
    """A colour for each exit that is ``used``.

    The draft's ``own`` list of exits comes first, so that an exit keeps its colour whichever others
    are used with it.

    >>> {each: color.name for each, color in color_exits(own=(2, 3, 4), used=(0, 3)).items()}
    {0: 'green', 3: 'orange'}
    """
    numbered = dict.fromkeys([*own, *used])
    all_colors = dict(zip(numbered, cycle(COLORS)))
    return {exit_layer: all_colors[exit_layer] for exit_layer in used}
