"""What methods' names stand for, such as ``s2d:draft_length=8:stop=0.4``, and loading them.

A name is a method of run.py and, after colons, options of run.py that say what drafts and how
(s2d/cli/README.md).
"""

from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.config import ModelFolder, read_folder
from ..checkpoint.load import load_model
from ..cli.program import Parser, add_drafting_options
from ..generation import decide
from ..model import Llama
from ..pair.loading import Choice, Pair, choose_pair, load_chosen
from ..pair.names import find_draft, find_target


def default_methods(target: str, draft: Path | None, exits: Sequence[int] | None) -> list[str]:
    """Every method for a ``target``, and ``sd`` from each exit of a draft alone.

    ``exits`` take the place of the draft's own. Without a draft, it is exit 0.
    """
    found = find_draft(read_folder(find_target(target)), draft, exits)
    if found is None:
        return ["s2d-tree:exits=0"]
    exits = exits or decide(found, method="s2d").layers
    single = [f"sd:exits={each}" for each in exits]
    together = ",".join(map(str, exits))
    names = f"mcsd:exits={exits[-1]}", f"s2d:exits={together}", f"s2d-tree:exits={together}"
    return [*single, *names]


def parse_method(text: str) -> dict[str, Any]:
    """The options that a method's name stands for, ``draft`` among them if it has one.

    What is no such name ends the program, as other mistakes on the command line do.
    """
    prog = f"python -m s2d.bench: method {text}"
    parser = Parser(prog, argument_default=SUPPRESS, allow_abbrev=False)
    add_drafting_options(parser)
    name, *settings = text.split(":")
    words = [f"--method={name}"]
    for setting in settings:
        key, equals, value = setting.partition("=")
        words.append(f"--{key.replace('_', '-')}{equals}{value}")
    return vars(parser.parse_args(words))


def choose_methods(target: str, methods: dict[str, str], args: Namespace) -> dict[str, Choice]:
    """What ``methods``, {label: name}, need for a ``target``; and "ar", the target alone.

    ``args.draft`` is the model that drafts where a name has none. Nothing is loaded yet. Raises
    ValueError or FileNotFoundError for what cannot be run.
    """
    for temperature in args.temperature:
        decide(None, temperature=temperature)  # ValueError for what is no temperature
    common = {name: vars(args)[name] for name in ("max_new_tokens", "top_p", "top_k", "seed")}
    choices = {}
    for label, name in {"ar": "ar", **methods}.items():
        options = common | parse_method(name)
        draft = options.pop("draft", args.draft)
        choices[label] = choose_pair(target, draft, **options)
    return choices


def load_methods(choices: dict[str, Choice], args: Namespace) -> dict[str, Pair]:
    """Load what is chosen for methods on one target: each model once, up to the last exit."""
    loaded: dict[Path, Llama] = {}
    last: dict[Path, int] = {}  # of a draft, the last of its exits
    for choice in choices.values():
        if choice.draft_folder is not None:
            path = choice.draft_folder.path
            last[path] = max([*choice.options.layers, last.get(path, 0)])

    def load(folder: ModelFolder, *where: Any, layers: int | None = None) -> Llama:
        if folder.path not in loaded:
            layers = layers and last[folder.path]  # a target has all
            loaded[folder.path] = load_model(folder, *where, layers=layers)
        return loaded[folder.path]

    pairs = {}
    for name, choice in choices.items():
        pairs[name] = load_chosen(choice, args.device, args.dtype, load)
    return pairs
