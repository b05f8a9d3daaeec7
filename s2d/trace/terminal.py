"""Answers on a terminal: streamed in the colours of the exits, then summed up; or as JSON."""

import json
import os
from dataclasses import replace
from itertools import cycle, groupby
from statistics import median

from ..generate import Options
from ..program import tell
from ..text.tokenizer import TextStream

COLORS = 36, 33, 35, 32, 34, 31  # ANSI escape sequences of the exits, shallowest first
# What a terminal would obey, all but line breaks and tabs -> how it is shown.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def paint(text, color):
    return f"\033[{color}m{text}\033[0m" if color and text else text


def sources(step):
    """For each token of a Step the exit that drafted it, None for the target's own."""
    accepted = [step.tree.exits[step.tree.sent[i]] for i in step.path]
    return [*accepted, None][: len(step.tokens)]


class Streamed:
    """Writes the tokens of Steps to ``out`` as they come, on a terminal in the colours of exits."""

    def __init__(self, tokenizer, out, exits):
        self.stream, self.out = TextStream(tokenizer), out
        self.controls = CONTROLS if out.isatty() else {}
        colored = out.isatty() and not os.environ.get("NO_COLOR")
        self.colors = dict(zip(exits, cycle(COLORS))) if colored else {}

    def add(self, step):
        for exit, run in groupby(zip(sources(step), step.tokens), key=lambda pair: pair[0]):
            text = self.stream.push([token for _, token in run]).translate(self.controls)
            print(paint(text, self.colors.get(exit)), end="", file=self.out, flush=True)

    def finish(self):
        print(self.stream.push([], last=True).translate(self.controls), file=self.out, flush=True)


def report(generation, colors):
    """The lines under an answer, with a legend where there are colours."""
    stats, speed = generation.stats, len(generation.tokens) / generation.stats.seconds
    lines = [
        f"tokens         {len(generation.tokens)} in {stats.seconds:.2f} s, {speed:.1f} tokens/s",
        f"ended by       {generation.ended}",
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


def compare(generate, options, generation):
    """How fast an answer was, as a line; where that does not pay, another line says why.

    The target alone and the method take turns on the answer's first tokens, two runs each.
    """
    tell("timing the target alone and the method in turns, to compare")
    count = min(len(generation.tokens), max(16, len(generation.tokens) // 4))
    names = "temperature", "top_p", "top_k", "seed"
    alone = Options("ar", **{name: getattr(options, name) for name in names})
    speeds = {"ar": [], options.method: []}
    for each in (alone, options, alone, options):
        again = generate(**vars(replace(each, max_new_tokens=count)))
        speeds[each.method].append(count / again.stats.seconds)
    ratio = median(speeds[options.method]) / median(speeds["ar"])
    lines = f"speed          {ratio:.2f} times as fast as the target alone (median of 2 runs each)"
    if ratio < 1:
        stats = again.stats
        right = stats.accepted / max(1, stats.exit_counts.total())
        tokens = stats.mean_accepted_tokens
        lines += f"\nwhy            {right:.0%} of the drafted tokens were right: a step gives "
        lines += f"{tokens:.1f} tokens, and takes {tokens / ratio:.1f} times as long as one alone"
    return lines


def as_json(generation, tokenizer, args, **before):
    """An answer and what it came from as one JSON object, with ``before`` first in it.

    ``args`` has the folders of the models, and options that are not the Decoder's own.
    """
    names = "steps mean_accepted_tokens accept_lengths acceptance_rate draft_forwards seconds"
    stats = {name: getattr(generation.stats, name) for name in names.split()}
    stats["exit_counts"] = dict(sorted(generation.stats.exit_counts.items()))
    stats["tokens_per_second"] = len(generation.tokens) / generation.stats.seconds
    target, options = generation.target, dict(vars(generation.options))
    del options["nodes_to_send"]
    options |= {"system": args.system, "datastore": args.datastore, "device": target.device}
    options["dtype"] = str(target.dtype).removeprefix("torch.")
    if callable(options["stop"]):  # a decision model
        options["stop"] = args.stop
    if isinstance(options["tree"], tuple):
        options["tree"] = {"widths": options["tree"]}
    elif options["tree"]:
        options["tree"] = vars(options["tree"])
    answer = before | {
        "text": tokenizer.decode(generation.tokens),
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_length,
        "exact": generation.exact,
        "ended": generation.ended,
        "model": args.target,
        "draft": args.draft,
        "method": options.pop("method"),
        "seed": options.pop("seed"),
        "options": options,
        "stats": stats,
    }
    return json.dumps(answer, default=str)


def answer_file(begin_all, tokenizer, encode, args):
    """Answer each line of a file; returns 2 where one could not be run, else 0.

    ``begin_all``: ids of all prompts -> pairs as from ``as_finished`` (extras/many.py).
    """
    lines = enumerate(args.prompts.read_text(encoding="utf-8").split("\n"), 1)
    prompts = [(f"line {number}", line) for number, line in lines if line.strip()]
    code = 0
    for i, generation in begin_all([encode([text]) for _, text in prompts]):
        name, text = prompts[i]
        if isinstance(generation, ValueError):
            tell(f"{name}: {generation}")
            code = 2
        elif args.json:
            print(as_json(generation, tokenizer, args, prompt=name), flush=True)
        else:
            print(f"## {name}: {text}\n\n{tokenizer.decode(generation.tokens)}\n", flush=True)
    return code
