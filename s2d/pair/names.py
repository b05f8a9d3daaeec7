"""Models by name: where the folder of a target is, and what is next to it that drafts for it."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.config import ModelFolder, read_folder
from ..checkpoint.notices import tell
from ..generation import refuse_other_vocabulary

WEIGHTS = Path(__file__).resolve().parents[2] / "weights"
FOLDER_OF_SIZE = {"7b": "vicuna-7b", "13b": "vicuna-13b", "70b": "llama-2-70b-chat"}
HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


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
    missing = ""
    if str(name) in FOLDER_OF_SIZE:
        missing = f"weights/{FOLDER_OF_SIZE[str(name)]} is not there. "
    what = f"{missing}{folder.name} is a miniature of {millions:.0f} million parameters"
    return f"{what} that knows a small made-up world: see weights/prompts.txt."


def find_draft(
    target: ModelFolder, draft: Path | str | None = None, exits: Sequence[int] | None = None
) -> ModelFolder | None:
    """The folder of the model that drafts for a ``target``; None if exit 0 drafts alone.

    It is what is given: a ``draft``, as ``find_target`` knows it, or exit 0 alone as ``exits``.
    Otherwise it is the draft of the target's family, next to the target, if that fits. If it does
    not, stderr says why. Raises ValueError or FileNotFoundError for a given one that cannot draft.
    """
    if exits is not None and list(exits) == [0]:
        return None
    if draft is not None:
        found = read_folder(find_target(draft))
        refuse_other_vocabulary(target, found)
        return found
    folder = target.path.absolute()
    is_vicuna = folder.name in FOLDER_OF_SIZE.values()
    family = "vicuna" if is_vicuna else folder.name.split("-")[0]
    place = folder.with_name(f"{family}-draft")
    if not place.is_dir():
        return None
    try:
        return find_draft(target, place)
    except (ValueError, OSError) as error:
        tell(f"{place}, the draft next to the target, is not used: {error}")
        return None


def find_datastore(target: ModelFolder) -> Path | None:
    """The datastore next to a ``target``, if there is one."""
    folder = target.path.absolute()
    file = folder.with_name(f"{folder.name}-datastore.safetensors")
    return file if file.is_file() else None
