"""The colours of exits, on the page of an answer and in pictures."""

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

from ..pair.loading import Pair


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


def exit_colors(pair: Pair) -> dict[int, Color]:
    """A colour for each exit that drafts."""
    own = pair.draft.drafting.get("exits", ()) if pair.draft else ()
    return color_exits(own=own, used=pair.options.exits)


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
