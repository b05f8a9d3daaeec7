"""The animated picture of README: an answer by the target alone and by S2D, side by side (SVG).

``python -m s2d.trace > race.svg`` measures and draws it. The tokens of a step appear when that step
ended, slowed down. The first frame, and a picture that stands still, shows all of them.
"""

from html import escape
from itertools import accumulate
from statistics import median
from textwrap import wrap

from ..checkpoint.tokenizer import TextStream
from ..cli.program import name_processor
from ..generation import start
from ..pair.loading import Pair
from ..stats import Step
from .colors import SHADES, Color, color_exits

PROMPT = "Tell me a story about a robot called Nora."
SLOWER = 20  # times
HOLD = 4  # seconds that both answers stay
COLUMNS = 44  # characters in a line
WIDTH = 8.4  # pixels from character to character
LINE = 23  # pixels from line to line
PANEL = 420  # pixels from the left edge of an answer to that of the next
TEXT = "text{font:14px monospace;white-space:pre}"
STILL = "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"


def measure(pair: Pair, method: str, rounds: int, tokens: int) -> tuple[list[Step], list[float]]:
    """The steps of an answer and, by the median of several ``rounds``, at which second they end."""
    prompt = pair.tokenizer.encode_chat([PROMPT])
    runs = []
    for _ in range(1 + rounds):  # the first one warms up
        options = dict(method=method, max_new_tokens=tokens)
        runs.append(list(start(pair.target, prompt, pair.draft, **options)))
    seconds = [median(step.seconds for step in same) for same in zip(*runs[1:])]
    return runs[0], list(accumulate(seconds))


def draw_race(pair: Pair, rounds: int = 9, tokens: int = 64) -> str:
    """The picture. Its title says what it shows, for readers who do not see it."""
    # In the options, a class stands for exit 0.
    colors = color_exits(getattr(each, "exit_layer", each) for each in pair.options.exits)
    alone = measure(pair, "ar", rounds, tokens)
    s2d = measure(pair, "s2d", rounds, tokens)
    period = HOLD + SLOWER * alone[1][-1]  # seconds
    style = f"{style_of(colors)}g{{animation:{period:.2f}s step-end infinite}}"
    body = ""
    results = []
    for panel, (title, (steps, ends)) in enumerate({"the target alone": alone, "S2D": s2d}.items()):
        left = 24 + PANEL * panel
        body += f'<text x="{left}" y="34" font-weight="700">{title}</text>'
        results.append(f"{title} in {len(steps)} passes and {1000 * ends[-1]:.0f} ms")
        stream = TextStream(pair.tokenizer)
        texts = [[stream.push([token]) for token in step.tokens] for step in steps]
        lines = wrap("".join(map("".join, texts)), COLUMNS, drop_whitespace=False)
        places = [(row, column) for row, line in enumerate(lines) for column in range(len(line))]
        for step, end in enumerate(ends):
            name = f"a{panel}-{step}"
            body += f'<g style="animation-name:{name}">'
            for text, exit_layer in zip(texts[step], steps[step].sources):
                kind = f' class="{colors[exit_layer].name}"' if exit_layer in colors else ""
                for letter in text:
                    row, column = places.pop(0)
                    place = f'x="{left + WIDTH * column:.1f}" y="{92 + LINE * row}"'
                    body += f"<text{kind} {place}>{escape(letter)}</text>"
            # The count covers that of the step before.
            body += f'<rect class="paper" x="{left}" y="46" width="400" height="20"/>'
            body += f'<text x="{left}" y="61">passes {step + 1}  {1000 * end:.0f} ms</text></g>'
            cleared = 100 * HOLD / period  # percent of the period
            shown = cleared + 100 * SLOWER * end / period
            frames = f"0%{{opacity:1}}{cleared:.2f}%{{opacity:0}}{shown:.2f}%{{opacity:1}}"
            style += f"\n@keyframes {name}{{{frames}}}"
    legend = ""
    for exit_layer, color in colors.items():
        legend += f'<tspan class="{color.name}">exit {exit_layer}</tspan>  '
    machine = f"{escape(name_processor())}, {str(pair.target.dtype).removeprefix('torch.')}"
    below = f"{SLOWER} times slower than measured ({machine})  {legend}the target"
    size = f'width="{2 * PANEL + 28}" height="{130 + LINE * len(lines)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} xml:space="preserve" role="img">'
        f"<title>Both write the same {tokens} tokens: {'; '.join(results)}.</title>"
        f'<style>{TEXT}{style}{STILL}</style><rect class="paper" {size}/>{body}'
        f'<text x="24" y="{114 + LINE * len(lines)}">{below}</text></svg>\n'
    )


def style_of(colors: dict[int, Color]) -> str:
    """Rules for light and for dark backgrounds, without variables: not every viewer knows them."""
    known = {"text": SHADES["ink"], ".paper": SHADES["paper"]}
    known |= {f".{color.name}": (color.light, color.dark) for color in colors.values()}
    light = "".join(f"{name}{{fill:{light}}}" for name, (light, _) in known.items())
    dark = "".join(f"{name}{{fill:{dark}}}" for name, (_, dark) in known.items())
    for color in colors.values():
        light += f".{color.name}{{text-decoration:underline {color.line}}}"
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
