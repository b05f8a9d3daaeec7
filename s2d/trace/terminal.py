"""An answer on a terminal: streamed in the colours of the exits, and reported.

Knows nothing about models.
"""

import os
import sys
from itertools import cycle, groupby, islice

from ..program import CONTROLS, tell
from ..text.tokenizer import TextStream

ENDS = {"eos": "EOS", "length": "--max-new-tokens", "context": "a full context", "": "interruption"}
LONG = 256  # tokens of a prompt whose reading is announced
COLORS = 36, 33, 35, 32, 34, 31  # ANSI escape sequences of the exits, shallowest first


def colors_of(exits, choice, out):
    """{exit layer: colour}, or {} where there are to be none; ``choice``: that of --color."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    wanted = choice == "always" or choice == "auto" and out.isatty() and not plain
    return dict(zip(exits, cycle(COLORS))) if wanted else {}


def exit_name(exit_layer):
    return f"after layer {exit_layer}" if exit_layer else "from the table"


def paint(text, color):
    return f"\033[{color}m{text}\033[0m" if color and text else text


class Streamed:
    """Writes tokens to ``out`` as steps come, or nowhere where that is None."""

    def __init__(self, tokenizer, out, colors):
        self.stream, self.out, self.colors = TextStream(tokenizer), out, colors
        self.shown = CONTROLS if out and out.isatty() else {}  # a model can say anything

    def add(self, step):
        pairs = zip(step.sources, step.tokens)
        for color, run in groupby(pairs, key=lambda pair: self.colors.get(pair[0])):
            text = self.stream.push([token for _, token in run])
            self.write(paint(text.translate(self.shown), color))

    def write(self, text):
        if self.out is not None:
            print(text, end="", file=self.out, flush=True)

    def finish(self):
        """The end of the line, or of what there is of it."""
        self.write(self.stream.finish().translate(self.shown) + "\n")


def announced(steps, count):
    """``steps``; until the first comes, a terminal says that a long prompt is read."""
    note, steps = f"reading a prompt of {count} tokens ...", iter(steps)
    if count >= LONG and sys.stderr.isatty():
        tell(note, end="\r")
        try:
            first = list(islice(steps, 1))
        finally:
            print(" " * len(note), end="\r", file=sys.stderr, flush=True)
        yield from first
    yield from steps


def report(generation, colors=()):
    """The short block under the text, with a legend where there are colours."""
    stats, speed = generation.stats, generation.tokens_per_second
    tokens, why = len(generation.tokens), ENDS[generation.ended]
    lines = [
        f"tokens         {tokens} in {stats.seconds:.2f} s, {speed:.1f} tokens/s, ended by {why}",
        f"steps          {stats.steps}, mean accepted tokens {stats.mean_accepted_tokens:.2f}",
    ]
    if drafted := sum(stats.exit_counts.values()):
        counts = sorted(stats.exit_counts.items())
        parts = [f"{count / drafted:.0%} {exit_name(layer)}" for layer, count in counts]
        lines.append(f"draft tokens   {drafted}: {', '.join(parts)}")
    plan = generation.plan
    if plan.costs and not plan.shape.fixed:
        alone, *others = plan.costs
        times = f"{others[-1] / alone:.1f} times as long here as one that checks none"
        lines.append(f"passes         one that checks {len(others)} drafted tokens takes {times};")
        lines.append("               so each step sends as many as give the most tokens a second")
    if colors:
        legend = [paint(exit_name(layer), color) for layer, color in colors.items()]
        lines.append(f"colours        {', '.join(legend)}, the target plain")
    lossy = "no: with several roots from the target the text is not the target's own"
    exact, method = "yes" if generation.exact else lossy, plan.options.method
    lines.append(f"exact          {exact}, method {method}")
    return "\n".join(lines)


def as_json(generation, prompt, tokenizer, about):
    """What ``--json`` prints, as a dictionary; ``about``: the models and options it came from."""
    names = "steps mean_accepted_tokens accept_lengths acceptance_rate draft_forwards seconds"
    names += " published_acceptance_rate"
    stats = {name: getattr(generation.stats, name) for name in names.split()}
    stats["exit_counts"] = dict(sorted(generation.stats.exit_counts.items()))
    stats["tokens_per_second"] = generation.tokens_per_second
    answer = {"text": tokenizer.decode(generation.tokens), "tokens": generation.tokens}
    answer |= {"prompt_tokens": len(prompt), "exact": generation.exact}
    answer |= {"ended": generation.ended or "interrupted"}
    return answer | about | {"stats": stats}
