"""Answers on a terminal: streamed in the colours of the exits, then summed up; or as JSON."""

import json
import math
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any, TextIO

import torch

from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..draft import Exit
from ..generation import generate
from ..model import Llama
from ..stats import Generation, Stats, Step
from .colors import Color

TURNS = 5  # of a comparison
# What a terminal would obey, all but line breaks and tabs -> how it is shown.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def paint(text: str, color: Color | None) -> str:
    return f"\033[{color.ansi}m{text}\033[0m" if color and text else text


class Streamed:
    """Writes the tokens of Steps to ``out`` as they come, on a terminal in ``colors`` of exits."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        out: TextIO,
        colors: dict[int, Color],
        stop_at: Sequence[str] = (),
    ) -> None:
        self.stream = TextStream(tokenizer, stop_at)
        self.out = out
        self.controls = CONTROLS if out.isatty() else {}
        colored = out.isatty() and not os.environ.get("NO_COLOR")
        self.colors = colors if colored else {}

    def add(self, step: Step) -> None:
        for exit_layer, run in groupby(zip(step.sources, step.tokens), key=lambda pair: pair[0]):
            text = self.stream.push([token for _, token in run]).translate(self.controls)
            print(paint(text, self.colors.get(exit_layer)), end="", file=self.out, flush=True)

    def finish(self) -> None:
        print(self.stream.push([], last=True).translate(self.controls), file=self.out, flush=True)


def report(generation: Generation, colors: dict[int, Color], dtype: torch.dtype) -> str:
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
        accepted = acceptance(stats, generation.options.exits)
        rates = " ".join(f"{100 * rate:.0f}" for rate in rates_by_position(accepted))
        lines.append(f"draft tokens   {drafted}, accepted at positions 1, 2, ...: {rates} %")
        per_exit = []
        for exit_layer, counted in accepted["per_exit"].items():
            asked, sure, drafted_here, right = counted.values()
            words = f"asked {asked}, sure {sure}, drafted {drafted_here}, right {right}"
            per_exit.append(f"exit {exit_layer}: {words}")
        lines.append(f"exits          {'; '.join(per_exit)}")
    if colors:
        legend = [paint(f"exit {exit_layer}", color) for exit_layer, color in colors.items()]
        lines.append(f"colours        {', '.join(legend)}, the target plain")
    kind = "lossless"
    if not generation.exact:
        kind = "not lossless (its rule is not)"
    elif dtype != torch.float64:
        kind += f", up to rounding in {str(dtype).removeprefix('torch.')}"
    lines.append(f"method         {generation.options.method}, {kind}")
    return "\n".join(lines)


def acceptance(stats: Stats, exits: Iterable[int | Exit]) -> dict[str, Any]:
    """What was drafted and accepted, by position and by exit.

    Names are those of vLLM's ``metrics.speculative_decoding``, or like them. A step counts if a
    tree was sent in it. The first position is 0. An exit is asked once for each level that it or a
    deeper one drafts, and it is sure if it drafts the level itself, as the last one always does.
    Levels of which no node was sent are not counted.
    """
    steps = stats.depth_sent[1]
    depths = range(1, len(stats.depth_sent) + 1)
    accepted = [stats.depth_accepted[depth] for depth in depths]
    reached = [steps, *accepted, 0]  # at k: the steps with at least k accepted tokens
    layers = [each if isinstance(each, int) else each.exit_layer for each in exits]
    per_exit = {}
    for index, layer in enumerate(layers):
        per_exit[layer] = {
            "num_asked": sum(stats.exit_levels[deeper] for deeper in layers[index:]),
            "num_sure": stats.exit_levels[layer],
            "num_draft_tokens": stats.exit_counts[layer],
            "num_accepted_draft_tokens": stats.exit_accepted[layer],
        }
    return {
        "mean_acceptance_length": 1 + stats.accepted_tokens / steps if steps else None,
        "draft_acceptance_rate": stats.accepted_tokens / stats.draft_tokens if steps else None,
        "acceptance_histogram": [reached[k] - reached[k + 1] for k in range(len(depths) + 1)],
        "num_spec_steps": steps,
        "num_draft_tokens": stats.draft_tokens,
        "num_accepted_draft_tokens": stats.accepted_tokens,
        "num_drafts_per_pos": [stats.depth_sent[depth] for depth in depths],
        "num_accepted_tokens_per_pos": accepted,
        "per_exit": per_exit,
    }


def rates_by_position(accepted: dict[str, Any]) -> list[float]:
    """The share of the trees with a node at a position of which one was accepted there."""
    pairs = zip(accepted["num_accepted_tokens_per_pos"], accepted["num_drafts_per_pos"])
    return [right / drafted for right, drafted in pairs]


def compare(target: Llama, draft: Llama | None, prompt: list[int], answer: Generation) -> str:
    """How fast an ``answer`` to the ids of a prompt was, next to the target alone.

    The target alone and the method take turns on the answer's first tokens. If the method does not
    pay, the text says why.
    """
    tell("timing the target alone and the method in turns, to compare")
    count = min(len(answer.tokens), max(16, len(answer.tokens) // 4))
    drafted = vars(replace(answer.options, max_new_tokens=count))
    alone = drafted | {"method": "ar"}
    turns_alone = []
    turns_drafted = []
    for _ in range(TURNS):
        turns_alone.append(generate(target, prompt, **alone))
        turns_drafted.append(generate(target, prompt, draft, **drafted))
    ratio = median_speed(turns_drafted) / median_speed(turns_alone)
    lines = f"speed          {ratio:.2f} times as fast as the target alone "
    lines += f"(median of {TURNS} runs of up to {count} tokens)"
    if ratio < 1:
        stats = turns_drafted[-1].stats
        right = stats.exit_accepted.total() / max(1, stats.exit_counts.total())
        tokens = stats.mean_accepted_tokens
        lines += f"\nwhy            {right:.0%} of the drafted tokens were right: a step gives "
        lines += f"{tokens:.1f} tokens, and takes {tokens / ratio:.1f} times as long as one alone"
    return lines


def median_speed(turns: list[Generation]) -> float:
    """Tokens per second. Texts may differ in length: with rejection sampling they are others."""
    return median(len(turn.tokens) / turn.stats.seconds for turn in turns)


# What JSON says of the Options, besides the method, the seed and the shape.
SHOWN = "max_new_tokens temperature top_p top_k exits thresholds stop rule".split()


def as_json(generation: Generation, tokenizer: Tokenizer, about: dict[str, Any]) -> str:
    """An answer and what it came from as one JSON object.

    ``about``: model, draft, and what else was chosen besides the Decoder's own Options; what it
    says of "options" is added to those of the Options, or takes their place.
    """
    names = "steps mean_accepted_tokens accept_lengths acceptance_rate draft_levels seconds"
    stats = {name: getattr(generation.stats, name) for name in names.split()}
    stats["exit_counts"] = dict(sorted(generation.stats.exit_counts.items()))
    seconds = generation.stats.seconds or math.inf  # 0 if Ctrl-C came before the first step
    stats["tokens_per_second"] = len(generation.tokens) / seconds
    stats["speculative_decoding"] = acceptance(generation.stats, generation.options.exits)
    chosen = vars(generation.options)
    options = {name: chosen[name] for name in SHOWN}
    shape = generation.options.shape
    options["shape"] = asdict(shape) if is_dataclass(shape) else str(shape)
    about = dict(about)
    options |= about.pop("options")
    answer = {
        "text": generation.text(tokenizer),
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_length,
        "exact": generation.exact,
        "ended": generation.ended,
        "method": generation.options.method,
        "seed": generation.options.seed,
        "options": options,
        "stats": stats,
    }
    return json.dumps(about | answer, default=str)


def about(args: Namespace, models: Any) -> dict[str, Any]:
    """What JSON says about an answer of run.py besides the Decoder's own Options."""
    dtype = str(models.pair.target.dtype).removeprefix("torch.")
    options = {"system": args.system, "stop_at": args.stop_strings}
    options |= {"datastore": args.datastore or models.pair.found.datastore}
    options |= {"device": models.pair.target.device, "dtype": dtype}
    return {"model": models.pair.folder, "draft": models.pair.found.draft, "options": options}
