"""The README's picture: an answer by the target alone and by S2D, side by side, as it came (SVG).

``python -m s2d.trace.race > race.svg``
"""

from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from ..checkpoint.pair import Pair, load_pair
from ..checkpoint.tokenizer import TextStream
from ..cli.colors import color_exits
from ..generation import start
from ..options import Options, default_drafting

PROMPT = "Tell me a story about a robot called Nora."
SLOWER, HOLD = 20, 4  # times; seconds that both answers stay
COLUMNS, WIDTH, LINE, PANEL = 44, 8.4, 23, 420  # characters of a line; pixels
STYLE = """text{font:14px monospace;fill:var(--ink);white-space:pre}
svg{--paper:#fff;--ink:#1c1c1c;LIGHT}.paper{fill:var(--paper)}
@media(prefers-color-scheme:dark){svg{--paper:#16181b;--ink:#e8e6e1;DARK}}
g{animation:PERIODs step-end infinite}
@media(prefers-reduced-motion:reduce){g{animation:none!important}}"""


def draw_race(pair: Pair, rounds: int = 9, tokens: int = 64) -> str:
    """The picture. The tokens of a step appear when it ended, slowed down; then it begins anew."""
    exits = default_drafting(pair.draft.config).exits
    colors = color_exits(exits, exits)
    prompt = pair.tokenizer.encode_chat([PROMPT])
    answers = []
    for title, method in (("the target alone", "ar"), ("S2D", "s2d")):
        options: dict[str, Any] = dict(method=method, max_new_tokens=tokens)
        runs = [list(start(pair.target, prompt, pair.draft, **options)) for _ in range(1 + rounds)]
        seconds = [median(step.seconds for step in same) for same in zip(*runs[1:])]
        answers.append((title, runs[0], list(accumulate(seconds))))
    period = SLOWER * max(ends[-1] for _, _, ends in answers) + HOLD
    style = STYLE.replace("PERIOD", f"{period:.2f}")
    for word, shade in (("LIGHT", "light"), ("DARK", "dark")):
        shades = (f"--{each.name}:{getattr(each, shade)}" for each in colors.values())
        style = style.replace(word, ";".join(shades))
    for each in colors.values():
        line = f"text-decoration:underline {each.line}"
        style += f"\n.{each.name}{{fill:var(--{each.name});{line}}}"
    parts = []
    for panel, (title, steps, ends) in enumerate(answers):
        left = 24 + PANEL * panel
        parts.append(f'<text x="{left}" y="34" font-weight="700">{title}</text>')
        stream = TextStream(pair.tokenizer)
        texts = [[stream.push([token]) for token in step.tokens] for step in steps]
        lines = wrap("".join(map("".join, texts)), COLUMNS, drop_whitespace=False)
        places = ((row, column) for row, line in enumerate(lines) for column in range(len(line)))
        for number, (step, own, end) in enumerate(zip(steps, texts, ends), start=1):
            letters = []
            for text, exit_layer in zip(own, step.sources):
                kind = "" if exit_layer is None else f' class="{colors[exit_layer].name}"'
                for letter, (row, column) in zip(text, places):
                    x, y = left + WIDTH * column, 92 + LINE * row
                    letters.append(f'<text{kind} x="{x:.1f}" y="{y}">{escape(letter)}</text>')
            name, share = f"a{panel}-{number}", 100 * end * SLOWER / period
            style += f"\n@keyframes {name}{{0%{{opacity:0}}{share:.2f}%{{opacity:1}}}}"
            parts.append(
                f'<g style="animation-name:{name}">{"".join(letters)}'
                f'<rect class="paper" x="{left}" y="46" width="400" height="20"/>'  # over the last
                f'<text x="{left}" y="61">passes {number}  {1000 * end:.0f} ms</text></g>'
            )
    legend = (f'<tspan class="{c.name}">exit {e}</tspan>  ' for e, c in colors.items())
    size = f'width="{2 * PANEL + 28}" height="{130 + LINE * len(lines)}"'
    told = [
        f"{title} in {len(s)} passes and {1000 * ends[-1]:.0f} ms" for title, s, ends in answers
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} xml:space="preserve"><title>'
        f"{'; '.join(told)}.</title><style>{style}</style>"
        f'<rect class="paper" {size}/>{"".join(parts)}'
        f'<text x="24" y="{114 + LINE * len(lines)}">{SLOWER} times slower than measured, '
        f"{pair.target.dtype}  {''.join(legend)}</text></svg>\n"
    )


if __name__ == "__main__":
    weights = Path(__file__).parents[2] / "weights"
    print(draw_race(load_pair(weights / "mini-13b", options=Options(exits=(2, 3)))), end="")
