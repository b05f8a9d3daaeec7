"""Answers on a terminal: streamed, then summed up; or as JSON."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import floor, log2
from statistics import median
from typing import Any

import torch

from ..checkpoint.load import name_of
from ..checkpoint.notices import CONTROLS, tell
from ..checkpoint.tokenizer import TextStream
from ..generation import make_decoder
from ..model import Llama
from ..options import Options
from ..pair.loading import Pair
from ..sampling import Draws
from ..stats import Generation, Step
from ..tree import FixedShape

TURNS = 5  # of a comparison
# Steps of the dtype: texts part by rounding where two tokens are so near, and else by a fault.
ROUNDING = 16


def show(text: str, end: str = "\n") -> None:
    """Print ``text``; a terminal shows its control characters and does not obey them."""
    if sys.stdout.isatty():
        text = text.translate(CONTROLS)
    print(text, end=end, flush=True)


def stream(steps: Iterable[Step], pair: Pair, stop_at: Sequence[str] = ()) -> None:
    """Print the tokens of ``steps`` as they come."""
    text = TextStream(pair.tokenizer, stop_at)
    try:
        for step in steps:
            show(text.push(step.tokens), end="")
    finally:  # Ctrl-C ends the line as well
        show(text.push([], last=True))


def report(generation: Generation, pair: Pair) -> str:
    """What is said about an answer.

    Below float64 a pass over several tokens rounds differently from passes over one token each. So
    where two logits are nearly equal, a lossless method may write another text.
    """
    stats = generation.stats
    options = generation.options
    time = f"{stats.seconds:.2f} s, {speed_of(generation):.1f} tokens/s"
    lines = [
        f"tokens         {len(generation.tokens)} in {time}",
        f"ended by       {generation.ended}",
        f"steps          {stats.steps}, with {stats.mean_accepted_tokens:.2f} tokens each",
    ]
    drafted = stats.sent.total()
    if drafted:
        acceptance = stats.acceptance()
        rates = " ".join(f"{100 * rate:.0f}" for rate in acceptance["rates_per_pos"])
        words = f"{drafted}, accepted at positions 1, 2, ...: {rates} %"
        lines.append(f"draft tokens   {words}")
        exits = []
        for exit_layer, counts in acceptance["per_exit"].items():
            asked, sent, right = counts.values()
            words = f"asked {asked} times, drafted {sent} tokens, {right} right"
            exits.append(f"exit {exit_layer}: {words}")
        lines.append(f"exits          {'; '.join(exits)}")
    words = "lossless" if generation.exact else "not lossless (its rule is not)"
    if generation.exact and is_bitwise(options) and not draws_anew(options):
        words += ", bit for bit, as --method ar --bitwise"
    elif generation.exact and pair.target.dtype != torch.float64:
        words += f", up to rounding in {name_of(pair.target.dtype)}"
    lines.append(f"method         {options.method}, {words}")
    return "\n".join(lines)


def compare_speed(pair: Pair, prompt: list[int], answer: Generation) -> str:
    """How fast an ``answer`` to the ids of a prompt was, next to the target alone.

    The target alone and the method take turns on the answer's first tokens.
    """
    tell("timing the target alone and the method in turns, to compare")
    count = min(len(answer.tokens), max(16, len(answer.tokens) // 4))
    options = replace(answer.options, max_new_tokens=count)
    decoder = options.decoder if is_bitwise(options) else None
    no_draft = dict(method="ar", exits=(), tree=FixedShape(()), decoder=decoder)
    target_alone = replace(options, **no_draft)
    alone = []
    drafted = []
    for _ in range(TURNS):
        plain = make_decoder(pair.target, prompt, None, target_alone).run()
        alone.append(speed_of(plain))
        again = make_decoder(pair.target, prompt, pair.draft, options).run()
        drafted.append(speed_of(again))
    ratio = median(drafted) / median(alone)
    turns = f"median of {TURNS} runs of up to {count} tokens"
    line = f"speed          {ratio:.2f} times as fast as the target alone ({turns})"
    for place, tokens in enumerate(zip(plain.tokens, again.tokens)):
        if tokens[0] != tokens[1] and again.exact and not draws_anew(options):
            before = prompt + plain.tokens[:place]
            gap = gap_in_steps(pair.target, options, options.seed, before, tokens)
            cause = "by rounding" if gap <= ROUNDING else "which is a fault"
            words = f"the target alone has another token {place + 1}, {gap:.1f} steps apart"
            return f"{line}\ntext           {words} in {name_of(pair.target.dtype)}: {cause}"
    return line


def is_bitwise(options: Options) -> bool:
    """Whether all passes have one size (passes/bitwise.py)."""
    return getattr(options.decoder, "is_bitwise", False)


def draws_anew(options: Options) -> bool:
    """Whether the text is another draw than that of the target alone, as by rejection sampling."""
    return options.rule != "noise" and options.temperature > 0


def gap_in_steps(
    target: Llama, options: Options, seed: int, before: list[int], tokens: tuple[int, int]
) -> float:
    """How far apart two ``tokens`` were after the ids ``before``, in steps of the target's dtype.

    A step is the distance from the larger logit to the next number. Above temperature 0, what
    decides between the tokens is logits / T + g (``sampling.Draws.noise``).
    """
    with torch.inference_mode():
        logits = target(torch.tensor([before], device=target.device))[0, -1].double()  # (V,)
    size = logits[list(tokens)].abs().max().item()
    step = torch.finfo(target.dtype).eps * 2.0 ** floor(log2(max(size, 1e-30)))
    scores = logits
    if options.temperature > 0:
        scores = logits + options.temperature * Draws(seed).noise([len(before)], logits[None])[0]
    return abs(scores[tokens[0]] - scores[tokens[1]]).item() / step


def speed_of(generation: Generation) -> float:
    """Tokens per second."""
    return len(generation.tokens) / generation.stats.seconds


def as_json(generation: Generation, args: Namespace, pair: Pair, **named: Any) -> str:
    """An answer and what it came from as one JSON object; ``named`` comes first in it."""
    from ..pair.settings import describe  # which an answer as text does not need

    stats = generation.stats
    answer = named | {
        "model": pair.folder.path,
        "draft": pair.draft_folder and pair.draft_folder.path,
        "text": generation.text(pair.tokenizer),
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_length,
        "exact": generation.exact,
        "ended": generation.ended,
        "options": describe(generation.options),
        "arguments": vars(args),
        "device": pair.target.device,
        "dtype": name_of(pair.target.dtype),
        "stats": {
            "accept_lengths": stats.accept_lengths,
            "seconds": stats.seconds,
            "steps": stats.steps,
            "mean_accepted_tokens": stats.mean_accepted_tokens,
            "tokens_per_second": speed_of(generation),
            "speculative_decoding": stats.acceptance(),
        },
    }
    return json.dumps(answer, default=str)
