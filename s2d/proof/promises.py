"""``checked(part)``: which promise an exit, a rule or a shape of your own breaks."""

from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from torch import Tensor

from ..options import MAX_GROWN, MAX_NODES, expect
from ..rules import Prediction, Proposal
from ..stats import Step
from ..tree import Node, Tree

# The numbers that a part has or says, from and up to what.
NUMBERS = {"exit_layer": (0, inf), "max_positions": (0, inf)}
NUMBERS |= {"depth": (1, MAX_NODES), "width": (1, MAX_NODES)}


def contents(value: Any) -> Any:
    """What a part could change of a ``value`` that it is handed, as it is now."""
    if isinstance(value, Tensor):
        return value.nan_to_num().tolist()
    if isinstance(value, Node):
        return value, value.token, value.prob, contents(value.q)
    if isinstance(value, Tree | Step):
        value = list(vars(value).values())
    return [contents(each) for each in value] if isinstance(value, list | tuple) else value


class checked:
    """A ``part`` of your own that says which promise it breaks, in one ValueError.

    The draft and the loop check nothing, and hand their own objects to a part. So wrap a part while
    you write it: ``generate(..., rule=checked(Own), exits=[checked(Own)], tree=checked(shape))``.
    It is an exit, a rule or a shape, or a function that makes an exit or a rule. The checks look at
    values, so a GPU is waited for.
    """

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, *given: Any) -> "checked":
        """What the function makes."""
        return checked(self.part(*given))

    @property
    def __class__(self) -> type:
        """What ``isinstance`` sees: the next exit goes on from a checked ``LayerExit``."""
        return type(self.part)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if callable(value):
            return partial(self.ask, name)
        self.check_number(name, value)
        return value

    def ask(self, method: str, *given: Any) -> Any:
        """What a method of the part answers; it may not change what it is ``given``."""
        before = contents(given)
        answer = getattr(self.part, method)(*given)
        if contents(given) != before:
            raise ValueError(f"{method} changes what it is handed")
        check = vars(checked).get(f"check_{method}", checked.check_number)
        if hasattr(checked, f"check_{method}"):
            getattr(self, f"check_{method}")(answer, *given)
        return answer
