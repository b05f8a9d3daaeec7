"""Models by name: where their folders are, and the draft of each family."""

import os
from pathlib import Path

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
        raise FileNotFoundError(f"{folder} is missing; run: python -m s2d.weights get {name}")
    raise FileNotFoundError(f"no model folder at {folder}; the names are 7b, 13b, 70b, {SMOLLM2}")


def miniature_note(name):
    """A few words that say why a target's name stands for a miniature; "" if it does not."""
    if name in REAL and not (WEIGHTS / REAL[name]).is_dir():
        return f"{name}, since weights/{REAL[name]} is not there: "
    return ""


def draft_beside(target):
    """The folder where the draft of the target's family is, or would be."""
    target = Path(os.path.abspath(target))  # the name that was given, also of a link
    family = "vicuna" if target.name in REAL.values() else target.name.split("-")[0]
    return target.parent / f"{family}-draft"


def datastore_path(folder):
    """The file of the datastore of the model in ``folder``, which is next to it."""
    folder = Path(os.path.abspath(folder))
    return folder.with_name(f"{folder.name}-datastore.safetensors")
