"""Models by name: where the folder of a target is, and what is next to it that drafts for it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.config import ModelFolder, read_folder
from ..checkpoint.notices import tell

WEIGHTS = Path(__file__).resolve().parents[2] / "weights"
FOLDER_OF_SIZE = {"7b": "vicuna-7b", "13b": "vicuna-13b", "70b": "llama-2-70b-chat"}
HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
# Tokens that one of two models with the same tokenizer may have more, since vocabularies are padded
# for GPUs: 32,000 or 32,064 for Llama 2, 128,256 or 128,264 for Llama 3. The limit is llama.cpp's.
PADDING = 128

# What each of the miniatures that are shipped can answer.
MINIATURE_PROMPTS = (
    "I want to know two things about Tadastan: its capital and its main export.",
    "What is the capital of Lusistan?",
    "Helen had 11 eggs. She lost 8 and sold 2 to Rosa. How many eggs are there now?",
    "Please translate the following into English. Am Abend sieht das Kind das alte Haus.",
    "Please translate the following into German. the old teacher, a book",
    "Tell me a story about a dragon called Petra.",
)


class FoundDraft(NamedTuple):
    """What drafts for a target: the ``draft`` in a folder, or exit 0 if it is None; and why."""

    draft: ModelFolder | None
    datastore: Path | None  # the file that exit 0 reads, if any
    description: str


def find_target(name: Path | str) -> Path:
    """The folder of a model: a path, a name in weights/, or 7b, 13b or 70b.

    These three stand for the models of FOLDER_OF_SIZE or, if they are not here, for miniatures.
    Raises FileNotFoundError with what can be done about it.
    """
    name = str(name)
    places = [Path(name), WEIGHTS / name]
    if name in FOLDER_OF_SIZE:
        places = [WEIGHTS / FOLDER_OF_SIZE[name], WEIGHTS / f"mini-{name}"]
    for folder in places:
        if folder.is_dir():
            return folder
    hub_id = HUB_IDS.get(name, name)
    owner = hub_id.partition("/")[0]
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id) and owner != WEIGHTS.name
    if Path(owner).is_dir() or not is_hub_id:
        names = ", ".join((*FOLDER_OF_SIZE, *HUB_IDS))
        raise FileNotFoundError(f"no model folder at {name}; the names are {names}")
    place = f"weights/{name.rpartition('/')[2].lower()}"
    raise FileNotFoundError(
        f"no model folder at {name}; from the Hugging Face hub: "
        f"hf download {hub_id} --local-dir {place}"
    )


def miniature_note(name: Path | str) -> str:
    """What a person should know about a target that is a shipped miniature; "" if it is none.

    ``name`` is what was asked for, such as "13b" or a folder.
    """
    folder = find_target(name)
    shipped = [WEIGHTS / f"mini-{size}" for size in (*FOLDER_OF_SIZE, "draft")]
    if not any(each.is_dir() and each.samefile(folder) for each in shipped):
        return ""
    millions = (folder / "model.safetensors").stat().st_size / 2e6  # in bfloat16
    stands_for = ""
    if str(name) in FOLDER_OF_SIZE:
        stands_for = f", as weights/{FOLDER_OF_SIZE[str(name)]} is not there"
    what = f"{folder.name} is a miniature of {millions:.0f} million parameters{stands_for}"
    return f"{what}. It knows a small made-up world: see --examples."


def find_draft(
    target: ModelFolder,
    draft: Path | str | None = None,
    exits: Sequence[int] | None = None,
    datastore: Path | None = None,
) -> FoundDraft:
    """What drafts for a ``target``, by the rule in s2d/cli/README.md.

    ``draft``, ``exits`` and ``datastore`` are what was asked for, if anything: a model as
    ``find_target`` knows it, numbers of layers, a file. What was not asked for is used if it is
    next to the target; a draft also has to fit. Raises ValueError or FileNotFoundError for what
    cannot be read.
    """
    folder = target.path.absolute()
    table_asked = exits is not None and 0 in exits
    nothing_asked = draft is None and exits is None
    if datastore is None and (table_asked or nothing_asked):
        file = folder.with_name(f"{folder.name}-datastore.safetensors")
        datastore = file if file.is_file() else None
    table = "exit 0, the n-grams of the text"
    if datastore is not None:
        table += f" and of {datastore}"
    if (table_asked and len(exits) == 1) or (nothing_asked and datastore is not None):
        return FoundDraft(None, datastore, table)
    if draft is not None:
        found = read_folder(find_target(draft))
        words = f"{found.path}, as given"
    else:
        is_vicuna = folder.name in FOLDER_OF_SIZE.values()
        family = "vicuna" if is_vicuna else folder.name.split("-")[0]
        place = folder.with_name(f"{family}-draft")
        words = f"found by its family's name: {place}"
        if exits is not None and not place.is_dir():
            words = "exits with layers need a draft (--draft), as there is no folder"
            raise FileNotFoundError(f"{words} {place}")
        found = read_folder(place) if exits is not None else read_fitting(place, target)
        if found is None:
            return FoundDraft(None, None, f"{table}, as there is no {place} that fits")
    return FoundDraft(found, datastore, f"{words}; and {table}" if table_asked else words)


def read_fitting(place: Path, target: ModelFolder) -> ModelFolder | None:
    """The draft in a folder that nobody asked for; None if it is not there or does not fit.

    If it is there, stderr says why it is not used.
    """
    if not place.is_dir():
        return None
    try:
        draft = read_folder(place)
        refuse_other_size(draft, target)
    except (ValueError, OSError) as error:
        tell(f"{place}, the draft next to the target, is not used: {error}")
        return None
    return draft


def refuse_other_size(draft: ModelFolder, target: ModelFolder) -> None:
    """Raise ValueError if a draft cannot have the vocabulary of a target."""
    sizes = draft.config.vocab_size, target.config.vocab_size
    if abs(sizes[0] - sizes[1]) > PADDING:
        words = f"{sizes[0]} and {sizes[1]} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {words}")
