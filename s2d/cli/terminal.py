"""Answers on a terminal: streamed in the colours of the exits, then summed up; or as JSON."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from statistics import median
from typing import Any

import torch

from ..checkpoint.notices import CONTROLS, tell
from ..checkpoint.tokenizer import TextStream
from ..generation import generate, make_decoder
from ..options import Options
from ..pair.loading import Pair
from ..stats import Generation, Step
from ..tree import FixedShape, GrowingShape, Shape
from .colors import Color, color_exits

TURNS = 5  # of a comparison


def paint(text: str, color: Color | None) -> str:
    return f"\033[{color.ansi}m{text}\033[0m" if color and text else text


def show(text: str, color: Color | None = None, end: str = "\n") -> None:
    """Print ``text``; a terminal shows its control characters and does not obey them."""
    if sys.stdout.isatty():
        text = text.translate(CONTROLS)
    print(paint(text, color), end=end, flush=True)


def exit_colors(pair: Pair) -> dict[int, Color]:
    """A colour for each exit that drafts."""
    own = pair.draft.drafting.get("exits", ()) if pair.draft else ()
    return color_exits(own=own, used=pair.options.exits)


def uses_colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def stream(steps: Iterable[Step], pair: Pair, stop_at: Sequence[str] = ()) -> None:
    """Print the tokens of ``steps`` as they come, on a terminal in the colours of the exits."""
    text = TextStream(pair.tokenizer, stop_at)
    colors = exit_colors(pair) if uses_colors() else {}
    try:
        for step in steps:
            pairs = zip(step.sources, step.tokens)
            for exit_layer, run in groupby(pairs, key=lambda source_and_token: source_and_token[0]):
                new = text.push([token for _, token in run])
                show(new, colors.get(exit_layer), end="")
    finally:  # Ctrl-C ends the line as well
        show(text.push([], last=True))


def report(generation: Generation, pair: Pair) -> str:
    """What is said about an answer, with a legend on a terminal with colours.

    Below float64 a pass over several tokens rounds differently from passes over one token each. So
    where two logits are nearly equal, a lossless method may write another text.
    """
    stats = generation.stats
    time = f"{stats.seconds:.2f} s, {speed_of(generation):.1f} tokens/s"
    lines = [
        f"tokens         {len(generation.tokens)} in {time}",
        f"ended by       {generation.ended}",
        f"steps          {stats.steps}, with {stats.mean_accepted_tokens:.2f} tokens each",
    ]
    if stats.draft_tokens:
        acceptance = stats.acceptance()
        rates = " ".join(f"{100 * rate:.0f}" for rate in acceptance["rates_per_pos"])
        words = f"{stats.draft_tokens}, accepted at positions 1, 2, ...: {rates} %"
        lines.append(f"draft tokens   {words}")
        exits = []
        for exit_layer, counts in acceptance["per_exit"].items():
            asked, sent, right = counts.values()
            words = f"asked for {asked} levels, drafted {sent} tokens, {right} right"
            exits.append(f"exit {exit_layer}: {words}")
        lines.append(f"exits          {'; '.join(exits)}")
    if uses_colors() and sys.stderr.isatty():
        colors = exit_colors(pair)
        legend = [paint(f"exit {exit_layer}", color) for exit_layer, color in colors.items()]
        lines.append(f"colours        {', '.join(legend)}, the target plain")
    return "\n".join([*lines, *method_in_words(generation, pair)])


def method_in_words(generation: Generation, pair: Pair) -> list[str]:
    """The last lines of a report: how the text was drafted, and whether that is lossless."""
    options = generation.options
    words = options.method
    if options.exits:
        words += f", {shape_in_words(options.shape)}"
    words += ", lossless" if generation.exact else ", not lossless (its rule is not)"
    if generation.exact and pair.target.dtype != torch.float64:
        words += f", up to rounding in {str(pair.target.dtype).removeprefix('torch.')}"
    lines = [f"method         {words}"]
    if options.rule == "rejection":
        words = "a token is tested by p / q"
        if options.temperature == 0:
            words = "nothing is drawn at temperature 0"
        elif options.shape.prunes:
            words = "a token of a growing tree is not drawn from q, and is tested by p alone"
        lines.append(f"rejection      {words}")
    return lines


def shape_in_words(shape: Shape) -> str:
    if isinstance(shape, GrowingShape):
        return f"growing trees {shape.top_k}x{shape.depth}x{shape.size}"
    if max(shape.widths) == 1:
        return f"chains of up to {shape.depth} tokens"
    return f"trees {','.join(map(str, shape.widths))}"


def compare_speed(pair: Pair, prompt: list[int], answer: Generation) -> str:
    """How fast an ``answer`` to the ids of a prompt was, next to the target alone.

    The target alone and the method take turns on the answer's first tokens.
    """
    tell("timing the target alone and the method in turns, to compare")
    count = min(len(answer.tokens), max(16, len(answer.tokens) // 4))
    options = replace(answer.options, max_new_tokens=count)
    names = "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop_at"
    sampling = {name: getattr(options, name) for name in names}
    alone = []
    drafted = []
    for _ in range(TURNS):
        one = generate(pair.target, prompt, method="ar", **sampling)
        other = make_decoder(pair.target, prompt, pair.draft, options).run()
        alone.append(speed_of(one))
        drafted.append(speed_of(other))
    ratio = median(drafted) / median(alone)
    turns = f"median of {TURNS} runs of up to {count} tokens"
    return f"speed          {ratio:.2f} times as fast as the target alone ({turns})"


def speed_of(generation: Generation) -> float:
    """Tokens per second."""
    return len(generation.tokens) / generation.stats.seconds


def describe(options: Options) -> dict[str, Any]:
    """Settings as JSON can hold them; parts of one's own by their names."""
    settings = vars(options) | {"tree": options.shape}
    del settings["shape"]  # the option is called tree
    return json.loads(json.dumps(settings, default=plain))


def plain(value: Any) -> Any:
    """A shape by its numbers; another object, such as a decision model, by its class."""
    if isinstance(value, FixedShape | GrowingShape):
        return asdict(value)
    return getattr(value, "__name__", type(value).__name__)


def as_json(generation: Generation, args: Namespace, pair: Pair, **named: Any) -> str:
    """An answer and what it came from as one JSON object; ``named`` comes first in it."""
    options = describe(generation.options) | {
        "decision": args.decision,
        "datastore": pair.found.datastore,
        "stop_at": args.stop_strings,
        "system": args.system,
        "template_options": dict(args.template_option),
        "device": pair.target.device,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
    }
    names = "accept_lengths", "seconds", "steps", "mean_accepted_tokens"
    stats = {name: getattr(generation.stats, name) for name in names}
    stats["tokens_per_second"] = speed_of(generation)
    stats["speculative_decoding"] = generation.stats.acceptance()
    answer = named | {
        "model": pair.folder.path,
        "draft": pair.found.draft and pair.found.draft.path,
        "text": generation.text(pair.tokenizer),
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_length,
        "exact": generation.exact,
        "ended": generation.ended,
        "options": options,
        "stats": stats,
    }
    return json.dumps(answer, default=str)
