"""A folder that a web server can serve as it is: three answers to walk through, and an index."""

import re
import shutil
from html import escape
from pathlib import Path
from typing import Any

from ..checkpoint.tokenizer import Tokenizer
from ..cli.colors import color_exits
from ..files import staged_folder
from ..generation import start
from ..model import Llama
from ..notices import tell
from ..options import drafting_of
from .page import write_page
from .race import PROMPT
from .record import Recorder

FOLDER = Path(__file__).parent
TOKENS = 96
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {  # page -> what it shows, and its options
    "chain": (
        "A chain from one exit, tested by rejection sampling",
        dict(method="sd", temperature=1.0, rule="rejection"),
    ),
    "sorted": (
        "Sorted exits: each token is from the cheapest one that is sure",
        dict(method="s2d"),
    ),
    "tree": (
        "Sorted exits and a tree, where one seed gives one text",
        dict(method="s2d-tree", temperature=1.0),
    ),
}


def write_pages(
    target: Llama, draft: Llama, tokenizer: Tokenizer, names: dict[str, str], folder: Path
) -> None:
    """Write the ``folder``, which is not there yet; ``names``: those of the models."""
    prompt = tokenizer.encode_chat([PROMPT])
    own = drafting_of(draft).exits
    lines = []
    with staged_folder(folder) as stage:
        for page, (title, options) in ANSWERS.items():
            decoder = start(target, prompt, draft, max_new_tokens=TOKENS, **options)
            colors = color_exits(own, decoder.settings.exits)
            recorder = Recorder(tokenizer, decoder, names, colors)
            steps = list(recorder.record())
            write_page(recorder.data(), stage / f"{page}.html")
            counts = f"{len(decoder.tokens)} tokens in {len(steps)} steps"
            lines.append(f'<li><a href="{page}.html">{escape(title)}</a>: {counts}</li>')
        picture = FOLDER / "race.svg"
        shutil.copyfile(picture, stage / picture.name)
        index = (FOLDER / "index.html").read_text("utf-8")
        index = index.replace("@@prompt@@", escape(PROMPT))
        index = index.replace("@@alt@@", read_title(picture))
        index = index.replace("@@answers@@", "\n".join(lines))
        (stage / "index.html").write_text(index, encoding="utf-8")
    tell(f"wrote {folder}: open its index.html")


def read_title(picture: Path) -> str:
    """What a picture tells readers who do not see it, as markup."""
    return re.search(r"<title>(.*?)</title>", picture.read_text("utf-8"))[1]
