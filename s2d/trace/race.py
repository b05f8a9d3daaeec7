"""An answer by the target alone and by S2D, side by side: an animated picture (SVG with CSS).

Both write the same text. The tokens of a step appear when that step ended, as it was measured and
then slowed down. Without animation, or if the reader's system asks for less motion, the picture is
its last frame.
"""

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..cli.colors import Color, color_exits
from ..decoder import Decoder, Step
from ..files import staged_file
from ..generation import start
from ..model import Llama
from ..notices import tell
from ..options import drafting_of
from ..timing import QUIET

PROMPT = "Tell me a story about a robot called Nora."
TOKENS = 64
ROUNDS = 15  # of timing; the medians count
SECONDS = 9  # that the slower answer plays, about
HOLD = 4  # seconds that both answers stay

COLUMNS = 44  # characters in a line
LINE = 23  # pixels from line to line
CHARACTER = 8.4  # pixels from character to character
PANEL = 420  # pixels from the left edge of an answer to that of the next
GAP = 20  # pixels of them that stay empty
MARGIN = 24  # pixels on the left and on the right
TOP = 92  # pixels above the first line

STYLE = """
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:var(--ink);white-space:pre}
.title{font-weight:700}.faint{fill:var(--faint)}.cover{fill:var(--paper)}
.card{fill:var(--paper);stroke:var(--line)}.exit{text-decoration:underline}
svg{--paper:#fff;--ink:#1c1c1c;--faint:#595959;--line:#c9c9c2;LIGHT}
@media(prefers-color-scheme:dark){svg{--paper:#16181b;--ink:#e8e6e1;--faint:#a2a09a;--line:#50545b;DARK}}
g{animation:PERIODs step-end infinite}
@media(prefers-reduced-motion:reduce){g{animation:none!important}}
"""


class Moment(NamedTuple):
    """The end of a step."""

    seconds: float  # since the beginning of the answer
    texts: list[str]  # of the tokens that it emitted
    sources: list[int | None]  # which exit drafted each; None: the target


class Letter(NamedTuple):
    """A character, and where it stands."""

    character: str
    exit_layer: int | None  # of its token
    line: int
    column: int


@dataclass(frozen=True)
class Answer:
    """An answer as it came."""

    title: str
    moments: list[Moment]

    @property
    def seconds(self) -> float:
        return self.moments[-1].seconds

    @property
    def tokens(self) -> int:
        return sum(len(moment.texts) for moment in self.moments)


def write_race(target: Llama, draft: Llama, tokenizer: Tokenizer, rounds: int, file: Path) -> None:
    """Measure both answers, and draw them; the text for readers who see no pictures is told."""
    prompt = tokenizer.encode_chat([PROMPT])

    def start_alone() -> Decoder:
        return start(target, prompt, method="ar", max_new_tokens=TOKENS)

    def start_s2d() -> Decoder:
        return start(target, prompt, draft, "s2d", max_new_tokens=TOKENS)

    alone = measure(start_alone, rounds)
    s2d = measure(start_s2d, rounds)
    answers = [
        Answer("the target alone", moments_of(alone, tokenizer)),
        Answer("S2D", moments_of(s2d, tokenizer)),
    ]
    own = drafting_of(draft).exits
    threads = torch.get_num_threads()
    dtype = str(target.dtype).removeprefix("torch.")
    machine = f"{name_processor()}, {threads} thread{'s' * (threads > 1)}, {dtype}"
    picture = draw_race(answers, color_exits(own, own), machine)
    with staged_file(file) as stage:
        stage.write_text(picture, encoding="utf-8")
    tell(f"wrote {file}: {describe(answers)}")


def measure(start_decoder: Callable[[], Decoder], rounds: int) -> list[Step]:
    """The steps of a decoder; the seconds of each are the median of several ``rounds``."""
    list(start_decoder())  # warms up
    runs = [list(start_decoder()) for _ in range(rounds)]
    totals = [sum(step.seconds for step in run) for run in runs]
    if median(totals) > QUIET * min(totals):
        tell("measured next to other work: draw this picture again on a quiet machine")
    return [replace(same[0], seconds=median(step.seconds for step in same)) for same in zip(*runs)]


def moments_of(steps: list[Step], tokenizer: Tokenizer) -> list[Moment]:
    """The moments at which ``steps`` end that follow each other."""
    stream = TextStream(tokenizer)
    moments = []
    for step, end in zip(steps, accumulate(step.seconds for step in steps)):
        texts = [stream.push([token]) for token in step.tokens]
        moments.append(Moment(end, texts, step.sources))
    moments[-1].texts[-1] += stream.push([], last=True)
    return moments


def name_processor() -> str:
    """What the operating system calls the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # only Linux has it
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe(answers: list[Answer]) -> str:
    """The result in a sentence, for readers who see no pictures."""
    results = [
        f"{each.title} in {len(each.moments)} passes and {1000 * each.seconds:.0f} ms"
        for each in answers
    ]
    return f"Both write the same {answers[0].tokens} tokens: {'; '.join(results)}."


def draw_race(answers: list[Answer], colors: dict[int, Color], machine: str) -> str:
    """The picture as text; ``colors`` of the exits, ``machine``: where it was measured."""
    slowest = max(answer.seconds for answer in answers)
    factor = max(1, round(SECONDS / slowest))
    period = factor * slowest + HOLD
    parts = []
    keyframes = []
    for number, answer in enumerate(answers):
        parts.append(draw_answer(answer, colors, number))
        for step, moment in enumerate(answer.moments, start=1):
            share = 100 * moment.seconds * factor / period
            frames = f"{{0%{{opacity:0}}{share:.2f}%{{opacity:1}}}}"
            keyframes.append(f"@keyframes a{number}-{step}{frames}")
    lines = max(len(break_lines(text_of(answer))) for answer in answers)
    legend = TOP + LINE * lines + 10  # pixels from the top, as the next two
    caption = legend + LINE
    height = caption + 16
    width = 2 * MARGIN + 2 * PANEL - GAP
    words = f"{factor} times slower than measured ({machine})"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" xml:space="preserve" role="img">'
            f"<title>{escape(describe(answers))}</title>",
            f"<style>{make_style(colors, period)}{''.join(keyframes)}</style>",
            f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *parts,
            draw_legend(colors, MARGIN + PANEL, legend),
            f'<text class="faint" x="{MARGIN}" y="{caption}">{escape(words)}</text>',
            "</svg>\n",
        ]
    )


def make_style(colors: dict[int, Color], period: float) -> str:
    light = ";".join(f"--{color.name}:{color.light}" for color in colors.values())
    dark = ";".join(f"--{color.name}:{color.dark}" for color in colors.values())
    style = STYLE.replace("LIGHT", light).replace("DARK", dark)
    style = style.replace("PERIOD", f"{period:.2f}")
    for color in colors.values():
        style += f".{color.name}{{fill:var(--{color.name});text-decoration-style:{color.line}}}\n"
    return style


def draw_legend(colors: dict[int, Color], x: float, y: float) -> str:
    parts = []
    for number, (exit_layer, color) in enumerate(colors.items()):
        place = f'x="{x + 66 * number}" y="{y}"'
        parts.append(f'<text class="exit {color.name}" {place}>exit {exit_layer}</text>')
    parts.append(f'<text x="{x + 66 * len(colors)}" y="{y}">the target</text>')
    return "".join(parts)


def draw_answer(answer: Answer, colors: dict[int, Color], number: int) -> str:
    """A title, and for each step a group: its tokens, and a count that covers the one before it."""
    x = MARGIN + PANEL * number
    lines = break_lines(text_of(answer))
    places = ((line, column) for line, text in enumerate(lines) for column in range(len(text)))
    parts = [f'<text class="title" x="{x}" y="34">{answer.title}</text>']
    count = 0
    for step, moment in enumerate(answer.moments, start=1):
        letters = []
        for text, exit_layer in zip(moment.texts, moment.sources):
            for character in text:
                line, column = next(places)
                ends_line = column >= len(lines[line].rstrip())  # a space that nobody wants to see
                letters.append(Letter(character, None if ends_line else exit_layer, line, column))
        count += len(moment.texts)
        words = f"tokens {count}  passes {step}  {1000 * moment.seconds:.0f} ms"
        parts.append(
            f'<g style="animation-name:a{number}-{step}">{draw_letters(letters, colors, x)}'
            f'<rect class="cover" x="{x}" y="46" width="{PANEL - GAP}" height="20"/>'
            f'<text class="faint" x="{x}" y="61">{words}</text></g>'
        )
    return "".join(parts)


def draw_letters(letters: list[Letter], colors: dict[int, Color], left: float) -> str:
    """A text for each run of letters from one exit in one line."""
    parts = []
    for (exit_layer, line), group in groupby(letters, key=attrgetter("exit_layer", "line")):
        run = list(group)
        text = "".join(letter.character for letter in run)
        kind = "" if exit_layer is None else f' class="exit {colors[exit_layer].name}"'
        x = left + CHARACTER * run[0].column
        width = CHARACTER * len(text)  # whatever the font is
        parts.append(
            f'<text{kind} x="{x:.1f}" y="{TOP + LINE * line}" textLength="{width:.1f}">'
            f"{escape(text)}</text>"
        )
    return "".join(parts)


def text_of(answer: Answer) -> str:
    return "".join(text for moment in answer.moments for text in moment.texts)


def break_lines(text: str) -> list[str]:
    """Lines of up to COLUMNS characters and the space after them; together they are ``text``.

    >>> break_lines("Once there was a fox who had lost the way to its den. ")
    ['Once there was a fox who had lost the way to ', 'its den. ']
    """
    lines = [""]
    for word in re.findall(r"\S*\s|\S+$", text):
        if len(lines[-1] + word.rstrip()) > COLUMNS:
            lines.append("")
        lines[-1] += word
    return lines
