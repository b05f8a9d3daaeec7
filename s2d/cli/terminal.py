"""Answers on a terminal: streamed in the colours of the exits, then summed up; or as JSON."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass, replace
from itertools import cycle, groupby
from statistics import median
from typing import Any, TextIO

import torch

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..decoder import Generation, Step
from ..generation import make_decoder
from ..model import Llama
from ..notices import tell

TURNS = 5  # of a comparison
COLORS = 36, 33, 35, 32, 34, 31  # ANSI escape sequences of the exits, shallowest first
# What a terminal would obey, all but line breaks and tabs -> how it is shown.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def paint(text: str, color: int | None) -> str:
    return f"\033[{color}m{text}\033[0m" if color and text else text


class Streamed:
    """Writes the tokens of Steps to ``out`` as they come, on a terminal in the colours of exits."""

    def __init__(self, tokenizer: Tokenizer, out: TextIO, exits: Sequence[int]) -> None:
        self.stream = TextStream(tokenizer)
        self.out = out
        self.controls = CONTROLS if out.isatty() else {}
        colored = out.isatty() and not os.environ.get("NO_COLOR")
        self.colors = dict(zip(exits, cycle(COLORS))) if colored else {}

    def add(self, step: Step) -> None:
        for exit_layer, run in groupby(zip(step.sources, step.tokens), key=lambda pair: pair[0]):
            text = self.stream.push([token for _, token in run]).translate(self.controls)
            print(paint(text, self.colors.get(exit_layer)), end="", file=self.out, flush=True)

    def finish(self) -> None:
        print(self.stream.push([], last=True).translate(self.controls), file=self.out, flush=True)


def report(generation: Generation, colors: dict[int, int], dtype: torch.dtype) -> str:
    """The lines under an answer, with a legend if there are colours.

    Below float64 a pass over several tokens rounds differently from passes over one token each. So
    where two logits are nearly equal, a lossless method may write another text.
    """
    stats = generation.stats
    speed = len(generation.tokens) / stats.seconds
    lines = [
        f"tokens         {len(generation.tokens)} in {stats.seconds:.2f} s, {speed:.1f} tokens/s",
        f"ended by       {generation.ended}",
        f"steps          {stats.steps}, with {stats.mean_accepted_tokens:.2f} tokens each",
    ]
    if drafted := stats.exit_counts.total():
        counts = sorted(stats.exit_counts.items())
        parts = [f"{count / drafted:.0%} from exit {exit_layer}" for exit_layer, count in counts]
        lines.append(f"draft tokens   {drafted}: {', '.join(parts)}")
    if colors:
        legend = [paint(f"exit {exit_layer}", color) for exit_layer, color in colors.items()]
        lines.append(f"colours        {', '.join(legend)}, the target plain")
    kind = "lossless"
    if not generation.exact:
        kind = "not lossless (its rule is not)"
    elif dtype != torch.float64:
        kind += f", up to rounding in {str(dtype).removeprefix('torch.')}"
    lines.append(f"method         {generation.settings.method}, {kind}")
    return "\n".join(lines)


def compare(target: Llama, draft: Llama | None, prompt: list[int], answer: Generation) -> str:
    """How fast an ``answer`` to the ids of a prompt was, next to the target alone.

    The target alone and the method take turns on the answer's first tokens. If the method does not
    pay, the text says why.
    """
    tell("timing the target alone and the method in turns, to compare")
    count = min(len(answer.tokens), max(16, len(answer.tokens) // 4))
    drafted = replace(answer.settings, max_new_tokens=count)
    alone = replace(drafted, method="ar")
    turns_alone = []
    turns_drafted = []
    for _ in range(TURNS):
        turns_alone.append(make_decoder(target, prompt, draft, alone).run())
        turns_drafted.append(make_decoder(target, prompt, draft, drafted).run())
    ratio = median_speed(turns_drafted) / median_speed(turns_alone)
    lines = f"speed          {ratio:.2f} times as fast as the target alone "
    lines += f"(median of {TURNS} turns, up to {count} tokens each)"
    if ratio < 1:
        stats = turns_drafted[-1].stats
        right = stats.accepted_tokens / max(1, stats.exit_counts.total())
        tokens = stats.mean_accepted_tokens
        lines += f"\nwhy            {right:.0%} of the drafted tokens were right: a step gives "
        lines += f"{tokens:.1f} tokens, and takes {tokens / ratio:.1f} times as long as one alone"
    return lines


def median_speed(turns: list[Generation]) -> float:
    """Tokens per second. Texts may differ in length: with rejection sampling they are others."""
    return median(len(turn.tokens) / turn.stats.seconds for turn in turns)


# What JSON says of the Settings, besides the method, the seed and the shape.
SHOWN = "max_new_tokens temperature top_p top_k exits thresholds init stop rule".split()


def as_json(generation: Generation, tokenizer: Tokenizer, about: dict[str, Any]) -> str:
    """An answer and what it came from as one JSON object.

    ``about``: model, draft, and what else was chosen besides the Decoder's own Settings; what it
    says of "options" is added to those of the Settings, or takes their place.
    """
    names = "steps mean_accepted_tokens accept_lengths acceptance_rate draft_levels seconds"
    stats = {name: getattr(generation.stats, name) for name in names.split()}
    stats["exit_counts"] = dict(sorted(generation.stats.exit_counts.items()))
    stats["tokens_per_second"] = len(generation.tokens) / generation.stats.seconds
    settings = vars(generation.settings)
    options = {name: settings[name] for name in SHOWN}
    shape = generation.settings.shape
    options["shape"] = asdict(shape) if is_dataclass(shape) else str(shape)
    about = dict(about)
    options |= about.pop("options")
    answer = {
        "text": generation.text(tokenizer),
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_length,
        "exact": generation.exact,
        "ended": generation.ended,
        "method": generation.settings.method,
        "seed": generation.settings.seed,
        "options": options,
        "stats": stats,
    }
    return json.dumps(about | answer, default=str)
