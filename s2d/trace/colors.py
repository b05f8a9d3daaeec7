"""The colours of exits, on the page of an answer and in pictures."""

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple


class Color(NamedTuple):
    name: str  # of its class in a style sheet
    light: str  # on a light background
    dark: str  # on a dark background
    line: str  # the style of the line under a text, for those who do not see the colour


COLORS = (
    Color("teal", "#00707a", "#5fd0da", "solid"),
    Color("orange", "#9a5b00", "#f0b35a", "dashed"),
    Color("purple", "#8a2a8a", "#e08ae0", "dotted"),
    Color("green", "#2e7d1f", "#8fd97f", "double"),
    Color("blue", "#2b55c4", "#8fb0ff", "double"),
    Color("red", "#b3261e", "#ff9a92", "double"),
)


def color_exits(exits: Iterable[int]) -> dict[int, Color]:
    """A colour for each of the ``exits``, in their order."""
    return dict(zip(exits, cycle(COLORS)))


# Of something else than an exit: on a light background, and on a dark one.
SHADES = {
    "paper": ("#fbfbf9", "#16181b"),
    "panel": ("#ffffff", "#1f2226"),
    "ink": ("#1c1c1c", "#e8e6e1"),
    "faint": ("#565656", "#a2a09a"),
    "line": ("#c9c9c2", "#50545b"),
    "bar": ("#e8e8e2", "#2c3036"),
    "lit": ("#ffd54a", "#7a6200"),  # what is looked at
    "kept": ("#3b8f57", "#63bd82"),  # what was accepted
    "p": ("#2b6cb0", "#6fa8e0"),  # of the target
    "q": ("#c77a12", "#e8a84c"),  # of the draft
}
