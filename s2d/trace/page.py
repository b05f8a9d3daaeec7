"""The page itself: one file of HTML, style, script, recorded numbers and the code they are about.

Knows nothing about Steps.
"""

import inspect
import json
from pathlib import Path
from tempfile import TemporaryFile

from ..cache import KVCache
from ..decode import Scorer, decode_step
from ..draft import SortedDraft
from ..exits import LayerExit
from ..files import staged_file
from ..sampling import Sampler, warp
from ..tree import ancestor_mask
from ..verify import follow, residual, verify_chain, verify_sampled

FOLDER = Path(__file__).parent
BEGINNING = "<!doctype html>\n<!-- An answer of s2d, step by step. -->\n"
CODE = (decode_step, Scorer.wanted, Scorer.rows, SortedDraft.grow, SortedDraft.predict)
CODE += (LayerExit.catch_up, LayerExit.keep, KVCache.keep, ancestor_mask)
CODE += (follow, verify_chain, verify_sampled, residual, Sampler.race, warp)


def check_page(file):
    """ValueError where ``file`` has no folder, or is in the way and no page written here."""
    file = Path(file)
    try:
        TemporaryFile(dir=file.parent).close()
    except OSError as error:
        wrong = f"{file} cannot be written ({error.strerror}); name another file"
        raise ValueError(wrong) from None


def write_page(data, file):
    """Put what a Recorder has into one file; its text travels as JSON and is never markup."""
    code = {}
    for function in CODE:
        path = f"{function.__module__.replace('.', '/')}.py"
        code[function.__qualname__] = {"file": path, "text": inspect.getsource(function)}
    parts = {name: (FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js")}
    parts["data"] = as_script(data | {"code": code})
    pieces = (FOLDER / "page.html").read_text("utf-8").split("@@")
    page = BEGINNING + "".join(parts.get(piece, piece) for piece in pieces)
    with staged_file(file) as stage:
        stage.write_text(page, encoding="utf-8")


def as_script(data):
    """JSON that may stand between script tags: nothing in it ends them, or a line of JavaScript."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
