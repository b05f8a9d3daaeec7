"""Answers on a terminal: streamed in the colours of the exits, then summed up; or as JSON."""

import json
import os
from itertools import cycle, groupby

from ..program import CONTROLS, tell
from ..text.tokenizer import TextStream

COLORS = 36, 33, 35, 32, 34, 31  # ANSI escape sequences of the exits, shallowest first


def colors_of(exits, choice, out):
    """{exit: colour}, empty for plain text; ``choice``: auto, always or never."""
    auto = choice == "auto" and out.isatty() and not os.environ.get("NO_COLOR")
    return dict(zip(exits, cycle(COLORS))) if auto or choice == "always" else {}


def paint(text, color):
    return f"\033[{color}m{text}\033[0m" if color and text else text


def sources(step):
    """For each token of a Step the exit that drafted it, None for the target's own."""
    accepted = [step.tree.exits[step.tree.sent[i]] for i in step.path]
    return [*accepted, None][: len(step.tokens)]


class Streamed:
    """Writes the tokens of Steps to ``out`` as they come."""

    def __init__(self, tokenizer, out, colors):
        self.stream, self.out, self.colors = TextStream(tokenizer), out, colors
        self.shown = CONTROLS if out.isatty() else {}  # a model may write what a terminal obeys

    def add(self, step):
        for exit, run in groupby(zip(sources(step), step.tokens), key=lambda pair: pair[0]):
            text = self.stream.push([token for _, token in run]).translate(self.shown)
            print(paint(text, self.colors.get(exit)), end="", file=self.out, flush=True)

    def finish(self):
        print(self.stream.finish().translate(self.shown), file=self.out, flush=True)


def report(generation, colors):
    """The lines under an answer, with a legend where there are colours."""
    stats, speed = generation.stats, len(generation.tokens) / generation.stats.seconds
    lines = [
        f"tokens         {len(generation.tokens)} in {stats.seconds:.2f} s, {speed:.1f} tokens/s",
        f"ended by       {generation.ended or 'Ctrl-C'}",
        f"steps          {stats.steps}, mean accepted tokens {stats.mean_accepted_tokens:.2f}",
    ]
    if drafted := stats.exit_counts.total():
        counts = sorted(stats.exit_counts.items())
        parts = [f"{count / drafted:.0%} from exit {exit}" for exit, count in counts]
        lines.append(f"draft tokens   {drafted}: {', '.join(parts)}")
    if colors:
        legend = [paint(f"exit {exit}", color) for exit, color in colors.items()]
        lines.append(f"colours        {', '.join(legend)}, the target plain")
    exact = "yes" if generation.exact else "no (several roots from the target)"
    lines.append(f"exact          {exact}, method {generation.options.method}")
    return "\n".join(lines)


def as_json(generation, prompt, tokenizer, about):
    """What ``--json`` prints, as a dictionary; ``about``: the models and options it came from."""
    names = "steps mean_accepted_tokens accept_lengths acceptance_rate draft_forwards seconds"
    stats = {name: getattr(generation.stats, name) for name in names.split()}
    stats["exit_counts"] = dict(sorted(generation.stats.exit_counts.items()))
    stats["tokens_per_second"] = len(generation.tokens) / generation.stats.seconds
    answer = {"text": tokenizer.decode(generation.tokens), "tokens": generation.tokens}
    answer |= {"prompt_tokens": len(prompt), "exact": generation.exact}
    answer |= {"ended": generation.ended or "interrupted"}
    return answer | about | {"stats": stats}


def answer_all(prompts, ids, finished, tokenizer, about):
    """Show the answers to ``prompts`` [(name, text)]; 2 where one could not be run, else 0.

    ``finished``: pairs as from extras/many.py; ``about``: a Generation -> what JSON says besides.
    """
    failed = 0
    for i, generation in finished:
        name, text = prompts[i]
        if isinstance(generation, ValueError):
            tell(f"{name}: {generation}")
            failed = 2
        elif about:
            line = as_json(generation, ids[i], tokenizer, about(generation))
            print(json.dumps({"prompt": name} | line, default=str), flush=True)
        else:
            print(f"## {name}: {text}\n\n{tokenizer.decode(generation.tokens)}\n", flush=True)
    return failed
