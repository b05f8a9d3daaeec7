"""Models by name: where the folder of a target is, and what is next to it that drafts for it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..model import LlamaConfig
from ..notices import tell
from ..options import same_vocabulary
from .config import read_config, read_drafting
from .shards import read_tensors

WEIGHTS = Path(__file__).parent.parent.parent / "weights"
FOLDER_OF_SIZE = {"7b": "vicuna-7b", "13b": "vicuna-13b", "70b": "llama-2-70b-chat"}
SMOLLM2 = "smollm2-135m"


def find_target(name: str) -> Path:
    """The folder of a target: a size, smollm2-135m, or a path; FileNotFoundError if not there."""
    if name in FOLDER_OF_SIZE:
        real = WEIGHTS / FOLDER_OF_SIZE[name]
        return real if real.is_dir() else WEIGHTS / f"mini-{name}"
    folder = WEIGHTS / name if name == SMOLLM2 else Path(name)
    if folder.is_dir():
        return folder
    if name == SMOLLM2:
        raise FileNotFoundError(f"{folder} is missing; run: python -m s2d.checkpoint get {name}")
    raise FileNotFoundError(f"no model folder at {folder}; the names are 7b, 13b, 70b, {SMOLLM2}")


def miniature_note(name: str) -> str:
    """A few words that say why a target's name stands for a miniature; "" if it does not."""
    if name in FOLDER_OF_SIZE and not (WEIGHTS / FOLDER_OF_SIZE[name]).is_dir():
        return f"{name}, since weights/{FOLDER_OF_SIZE[name]} is not there: "
    return ""


@dataclass(frozen=True)
class FoundDraft:
    """What drafts for a target.

    Attributes:
        draft: the folder of a draft model; None if exit 0 drafts alone.
        datastore: the file of the datastore that exit 0 reads; None if it reads none.
        words: how this was chosen, for people.
    """

    draft: Path | None
    datastore: Path | None
    words: str


def find_draft(
    target: Path | str, draft: Path | str | None = None, exits: Sequence[int] | None = None
) -> FoundDraft:
    """What drafts for the target in a folder, by the rule in s2d/cli/README.md.

    ``draft`` and ``exits`` are what was asked for, if anything: a model as ``find_target`` knows
    it, and numbers of layers. What was not asked for is used if it is next to the target and fits;
    if it does not fit, that is said on stderr. Raises ValueError if the target's folder cannot be
    read, or if the target is to draft for itself with all of its layers; FileNotFoundError if there
    is no such draft.
    """
    config = read_config(target)
    nothing_asked = draft is None and exits is None
    table_asked = exits is not None and 0 in exits
    datastore = None
    table = "exit 0, the n-grams of the text"
    if nothing_asked or table_asked:
        datastore = find_datastore_file(target, config)
        if datastore is not None:
            table = f"{datastore}, found next to the target"
    if table_asked and len(exits) == 1:  # rule 2
        return FoundDraft(None, datastore, table)
    if draft is not None:  # rule 3
        draft = find_target(str(draft))
        refuse_whole_target(target, draft, exits)
        words = f"{draft}, as given"
    elif exits is not None:  # rule 4: if it is not there, loading it says so
        draft = draft_path(target)
        words = f"found by its family's name: {draft}"
    elif datastore is not None:  # rule 5
        return FoundDraft(None, datastore, table)
    else:
        draft = find_family_draft(target, config)
        if draft is None:  # rule 7
            words = f"{table}, as there is no {draft_path(target)} that fits"
            return FoundDraft(None, None, words)
        words = f"found by its family's name: {draft}"  # rule 6
    if table_asked:
        words += f"; and {table}"
    return FoundDraft(Path(draft), datastore, words)


def names_of(folder: Path | str) -> list[Path]:
    """The absolute paths of a folder: its own and, if that is a link, those it leads to, in order.

    If ``new`` is a link to ``old``, and that a link to the folder ``model``, they are new, old,
    model. What is next to a folder, or in its name, is looked for in this order.
    """
    real = os.path.realpath(folder)
    in_shell = os.path.join(os.environ.get("PWD", ""), folder)  # which knows the link after a cd
    names: list[str] = []
    for name in map(os.path.abspath, (in_shell, folder)):
        while name not in names:
            names.append(name)
            if os.path.islink(name):
                place = os.path.realpath(os.path.dirname(name))
                name = os.path.abspath(os.path.join(place, os.readlink(name)))
    names.append(real)
    return [Path(name) for name in dict.fromkeys(names) if os.path.realpath(name) == real]


def is_same_folder(one: Path | str, other: Path | str) -> bool:
    """Whether two names lead to one folder that is there."""
    return Path(one).is_dir() and Path(other).is_dir() and os.path.samefile(one, other)


def refuse_whole_target(target: Path | str, draft: Path | str, exits: Sequence[int] | None) -> None:
    """Raise ValueError if a target would draft for itself with all of its layers unasked.

    ``exits`` are what was asked for, if anything. Raises FileNotFoundError if there is no draft.
    """
    layers = read_config(draft).num_hidden_layers
    whole = read_drafting(draft).exits[-1] == layers
    if exits is None and whole and is_same_folder(target, draft):
        raise ValueError(
            f"{draft} would draft for itself with all of its {layers} layers; say after which of "
            "them it may predict: --exits, or exit_layers in its config.json"
        )


def draft_path(target: Path | str) -> Path:
    """The folder where the draft of the target's family is, or would be: next to the target."""
    drafts = []
    for each in names_of(target):
        family = "vicuna" if each.name in FOLDER_OF_SIZE.values() else each.name.split("-")[0]
        drafts.append(each.with_name(f"{family}-draft"))
    return next((draft for draft in drafts if draft.is_dir()), drafts[0])


def find_family_draft(target: Path | str, config: LlamaConfig) -> Path | None:
    """The folder of the draft of the target's family; None if there is none.

    ``config`` is the target's. One that does not fit counts as none, which is said on stderr.
    """
    draft = draft_path(target)
    if not draft.is_dir():
        return None
    try:
        read_drafting(draft)
        draft_config = read_config(draft)
        if not same_vocabulary(draft_config, config.vocab_size):
            sizes = f"{draft_config.vocab_size} tokens, the target {config.vocab_size}"
            raise ValueError(f"{draft} has a vocabulary of {sizes}")
        for _ in read_tensors(draft):  # opens each file, but reads no weights yet
            pass
    except (ValueError, OSError) as error:
        tell(f"the draft next to the target is not used: {error}")
        return None
    return draft


def datastore_path(target: Path | str) -> Path:
    """The file where the datastore of a target is, or would be: next to the target."""
    files = [each.with_name(f"{each.name}-datastore.safetensors") for each in names_of(target)]
    return next((file for file in files if file.is_file()), files[0])


def find_datastore_file(target: Path | str, config: LlamaConfig) -> Path | None:
    """The file of the target's datastore; None if there is none, as of ``find_family_draft``."""
    file = datastore_path(target)
    if not file.is_file():
        return None
    try:
        read_datastore(file, config.vocab_size)
    except (ValueError, OSError) as error:
        tell(f"the datastore next to the target is not used: {error}")
        return None
    return file


def read_datastore(file: Path, vocab_size: int) -> Tensor:
    """The tokens (N,) in the file of a datastore, see s2d/ngram/datastore.py.

    Raises ValueError if it is none, or has tokens that are not in the vocabulary.
    """
    try:
        tokens = load_file(file)["tokens"].to(torch.int32)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{file} is no datastore, or is damaged ({error})") from None
    if tokens.dim() != 1 or ((tokens < 0) | (tokens >= vocab_size)).any():
        raise ValueError(f"{file} is no list of ids of a vocabulary of {vocab_size} tokens")
    return tokens
