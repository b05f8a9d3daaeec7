"""What a method's name stands for, such as ``s2d:draft_length=8:stop=0.4``.

It is a method of run.py and, after colons, options of run.py that say what drafts and how
(s2d/cli/README.md).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.config import read_config
from ..cli.program import Parser, add_drafting_options
from ..options import default_drafting


@dataclass(frozen=True)
class Method:
    options: dict[str, Any]  # of ``Options``
    draft: Path | None  # the draft model; None: the one next to the target, or none


def default_methods(draft: Path | None, exits: Sequence[int] | None = None) -> list[str]:
    """Every method, and ``sd`` from each exit of a draft alone; exit 0 if there is no draft.

    ``exits`` take the place of the draft's own.
    """
    if draft is None:
        return ["s2d-tree:exits=0"]
    together = ""
    if exits is None:
        exits = default_drafting(read_config(draft)).exits
    else:
        together = f":exits={','.join(map(str, exits))}"
    single = [f"sd:exits={each}" for each in exits]
    return [*single, f"mcsd:exits={exits[-1]}", f"s2d{together}", f"s2d-tree{together}"]


def parse_method(text: str, draft: Path | None) -> Method:
    """The Method called ``text``, by default with a ``draft``.

    What is no such name ends the program, as other mistakes on the command line do.
    """
    parser = Parser(f"method {text}", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_drafting_options(parser)
    name, *settings = text.split(":")
    words = [f"--method={name}"]
    for setting in settings:
        key, equals, value = setting.partition("=")
        words.append(f"--{key.replace('_', '-')}{equals}{value}")
    options = vars(parser.parse_args(words))
    draft = options.pop("draft", draft)
    if name == "ar" or options.get("exits") == (0,):
        draft = None
    return Method(options, draft)
