"""The page itself: one file of HTML, style, script and what a Recorder has kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.files import staged
from ..checkpoint.notices import tell
from ..decoder import Decoder
from ..pair.loading import Pair
from ..passes.processes import from_rank_0
from ..stats import Step
from .colors import COLORS, SHADES, color_exits
from .record import Recorder

FOLDER = Path(__file__).parent


def trace(decoder: Decoder, pair: Pair, file: Path) -> Iterator[Step]:
    """Yield the steps of an answer, and write them to ``file`` as a page."""
    draft = pair.draft_folder
    about = {"target": pair.folder.path.name, "draft": draft and draft.path.name}
    about["colors"] = {each: color.name for each, color in color_exits(decoder.stats.exits).items()}
    recorder = Recorder(pair.tokenizer, decoder, about)
    for step in decoder:
        recorder.add(step)
        yield step
    from_rank_0(lambda: write_page(recorder.data(), file))
    tell(f"wrote {file}")


def write_page(data: dict[str, Any], file: Path) -> None:
    """Write one file; the texts in ``data`` travel as JSON and are never markup."""
    script = json.dumps(data, separators=(",", ":"))  # ASCII: no line separators of JavaScript
    script = script.replace("<", "\\u003c")  # nothing ends the element that the data are in
    page = (FOLDER / "page.html").read_text("utf-8")
    for name in ("page.css", "page.js"):
        page = page.replace(f"@@{name}@@", (FOLDER / name).read_text("utf-8"))
    page = page.replace("@@colors@@", style_of_colors())
    with staged(file) as stage:
        stage.write_text(page.replace("@@data@@", script), encoding="utf-8")


def style_of_colors() -> str:
    """Variables for SHADES, and a class for each colour of an exit: of its text and its bars."""
    rules = []
    for name, (light, dark) in SHADES.items():
        rules.append(f":root {{ --{name}: light-dark({light}, {dark}); }}")
    for color in COLORS:
        value = f"light-dark({color.light}, {color.dark})"
        rules.append(f".{color.name} {{ color: {value}; text-decoration-style: {color.line}; }}")
        rules.append(f".bar.{color.name} i {{ background: {value}; }}")
    return "\n".join(rules)
