"""Settings in words, for JSON."""

import json
import re
from dataclasses import asdict
from types import CellType, FunctionType
from typing import Any

from ..ngram.table import TableExit
from ..options import Options
from ..tree import FixedShape, GrowingShape


def describe(options: Options) -> dict[str, Any]:
    """Settings as JSON can hold them; parts of one's own by their names and by what they hold."""
    return json.loads(json.dumps(vars(options), default=plain))


def plain(value: Any) -> Any:
    """A shape of ours by its numbers, exit 0 by 0, and another part by what tells it apart.

    That is its name, the line of a function, and the values that a closure or an object holds.
    """
    if type(value) in (FixedShape, GrowingShape):
        return asdict(value)
    if isinstance(value, type):
        return value.exit_layer if issubclass(value, TableExit) else value.__qualname__
    text, held = repr(value), None
    if isinstance(value, FunctionType):
        text = f"{value.__qualname__} in line {value.__code__.co_firstlineno}"
        # An empty cell has no contents.
        filled = [cell for cell in value.__closure__ or () if cell != CellType()]
        held = [*(cell.cell_contents for cell in filled), *(value.__defaults__ or ())]
    elif type(value).__repr__ is object.__repr__:
        text, held = type(value).__name__, getattr(value, "__dict__", None)
    text += f" with {held}" if held else ""
    return re.sub(" at 0x[0-9a-f]+", "", text)  # an address is another one in each run
