"""The page itself: one file of HTML, style, script, the recorded numbers and the code that each part of it is about."""

import inspect
import json
from pathlib import Path
from tempfile import TemporaryFile

from ..cache import KVCache
from ..decode import Scorer, decode_step
from ..draft import SortedDraft
from ..files import stage_of, staged_file
from ..sampling import warp
from ..tree import ancestor_mask
from ..verify import follow, residual, verify_sampled

FOLDER = Path(__file__).parent
BEGINNING = "<!doctype html>\n<!-- An answer of s2d, step by step. -->\n"
CODE = (
    *(decode_step, Scorer.__call__, SortedDraft.grow, SortedDraft.predict, SortedDraft.catch_up),
    *(SortedDraft.keep, KVCache.keep, ancestor_mask, warp, follow, verify_sampled, residual),
)


def check_page(file):
    """Raise ValueError unless a page can be written to ``file``: there is a folder for it, and nothing in the way but such a page."""
    file = Path(file)
    if (
        file.is_symlink()
        or file.exists()
        and not (file.is_file() and file.read_bytes().startswith(BEGINNING.encode()))
    ):
        raise ValueError(
            f"{file} is in the way, and no page that was written here; name another file or remove it first"
        )
    try:
        with TemporaryFile(
            dir=file.parent, prefix=stage_of(file).name
        ):  # a name as long, and nobody else's
            pass
    except OSError as error:
        raise ValueError(
            f"{file} cannot be written ({error.strerror}); name another file"
        ) from None


def write_page(data, file):
    """Put what a Recorder has into one file. No text of it is ever markup: it travels as JSON and is shown as text."""
    code = {function.__qualname__: {"file": f"s2d/{'/'.join(function.__module__.split('.')[1:])}.py", "text": inspect.getsource(function)}
            for function in CODE}  # fmt: skip
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    parts = {"STYLE": (FOLDER / "page.css").read_text(encoding="utf-8"), "SCRIPT": (FOLDER / "page.js").read_text(encoding="utf-8"),
             "DATA": as_script(data | {"code": code})}  # fmt: skip
    before, *rest = page.split("@@")
    with staged_file(file) as stage:
        stage.write_text(
            BEGINNING + before + "".join(parts.get(part, part) for part in rest), encoding="utf-8"
        )


def as_script(data):
    """JSON that may stand between script tags: no character of it can end them, or a line of JavaScript."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
