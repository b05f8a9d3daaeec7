"""Models by name: where their folders are, and the draft of each family."""

from pathlib import Path

from ..files import names_of
from ..model import LlamaConfig
from ..notices import tell
from .config import read_config, read_drafting

WEIGHTS = Path(__file__).parent.parent.parent / "weights"
REAL = {"7b": "vicuna-7b", "13b": "vicuna-13b", "70b": "llama-2-70b-chat"}
SMOLLM2 = "smollm2-135m"


def find_target(name):
    """The folder of a target: a size, smollm2-135m, or a path; FileNotFoundError if not there."""
    if name in REAL:
        real = WEIGHTS / REAL[name]
        return real if real.is_dir() else WEIGHTS / f"mini-{name}"
    folder = WEIGHTS / name if name == SMOLLM2 else Path(name)
    if folder.is_dir():
        return folder
    if name == SMOLLM2:
        raise FileNotFoundError(f"{folder} is missing; run: python -m s2d.checkpoint get {name}")
    raise FileNotFoundError(f"no model folder at {folder}; the names are 7b, 13b, 70b, {SMOLLM2}")


def miniature_note(name):
    """A few words that say why a target's name stands for a miniature; "" if it does not."""
    if name in REAL and not (WEIGHTS / REAL[name]).is_dir():
        return f"{name}, since weights/{REAL[name]} is not there: "
    return ""


def draft_beside(target: Path | str) -> Path:
    """The folder where the draft of the target's family is, or would be: next to the target."""
    drafts = []
    for each in names_of(target):
        family = "vicuna" if each.name in REAL.values() else each.name.split("-")[0]
        drafts.append(each.with_name(f"{family}-draft"))
    return next((draft for draft in drafts if draft.is_dir()), drafts[0])


def find_draft(target: Path | str, config: LlamaConfig) -> Path | None:
    """The folder of the draft of the target's family; None if there is none.

    ``config`` is the target's. One that does not fit counts as none, which is said on stderr.
    """
    draft = draft_beside(target)
    if not draft.is_dir():
        return None
    try:
        read_drafting(draft)
        size = read_config(draft).vocab_size
    except (ValueError, OSError) as error:
        tell(f"the draft next to the target is not used: {error}")
        return None
    if size != config.vocab_size:
        sizes = f"{size} tokens, the target {config.vocab_size}"
        tell(f"the draft next to the target is not used: {draft} has a vocabulary of {sizes}")
        return None
    return draft


def datastore_path(folder: Path | str) -> Path:
    """The file where the datastore of the model in ``folder`` is, or would be: next to it."""
    files = [each.with_name(f"{each.name}-datastore.safetensors") for each in names_of(folder)]
    return next((file for file in files if file.is_file()), files[0])
