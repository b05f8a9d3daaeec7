"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, in which matmuls read
every weight once; attention alone is done per prompt, on its own KV cache and with its own mask.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..decoder import Decoder
from ..generation import make_decoder, make_plan
from ..model import Llama, attention
from ..options import Plan
from ..stats import Generation, Step
from ..tree import Tree

MAX_BATCH = 1024  # prompts in a pass


def generate_many(
    target: Llama,
    prompts: Iterable[list[int]],
    draft: Llama | None = None,
    method: str | None = None,
    batch: int = 8,
    **options: Any,
) -> Iterator[Generation]:
    """Continue each of ``prompts`` as ``generate`` would; yields the answers in order.

    ``batch`` prompts are decoded at a time, and the next one begins when one ends. Prompt i has
    ``seed`` + i: its text is what ``generate`` writes with this seed, up to rounding. The seconds
    of an answer are those of its steps, which other prompts share. An exit or a rule of your own is
    one object for all prompts, so it must keep nothing between calls. Raises what ``generate``
    raises; the answers before a prompt that cannot be run are yielded first.
    """
    plan = make_plan(draft, method=method, **options)
    for number, result in enumerate(decode_many(target, prompts, draft, plan, batch)):
        if isinstance(result, ValueError):
            raise ValueError(f"prompt {number}: {result}")
        yield result


def decode_many(
    target: Llama, prompts: Iterable[list[int]], draft: Llama | None, plan: Plan, batch: int
) -> Iterator[Generation | ValueError]:
    """Yield the answer to each prompt, in order. Of a prompt that cannot be run, its ValueError."""
    if not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"batch: expected a whole number from 1 to {MAX_BATCH}, not {batch!r:.20}")
    numbered = enumerate(prompts)
    active: dict[int, Decoder] = {}
    results: dict[int, Generation | ValueError] = {}  # what may be yielded, or waits for its turn
    number = 0  # of the prompt whose turn it is
    while True:
        for index, prompt in islice(numbered, batch - len(active)):
            options = replace(plan.options, seed=plan.options.seed + index)
            try:
                active[index] = make_decoder(target, prompt, draft, replace(plan, options=options))
            except ValueError as error:
                results[index] = error
        if active:
            results |= run_step(target, active)
        elif not results:
            return
        while number in results:
            yield results.pop(number)
            number += 1


def run_step(target: Llama, active: dict[int, Decoder]) -> dict[int, Generation | ValueError]:
    """A step of every Decoder of ``active``; those that end or fail leave it. Returns their ends.

    The parts of a step are those of ``Decoder.__iter__``.
    """
    results: dict[int, Generation | ValueError] = {}
    with torch.inference_mode():
        began = time.perf_counter()
        steps = {}
        for index, decoder in active.items():
            try:
                steps[index] = Step(decoder.draft())
            except ValueError as error:
                results[index] = error
        drafted = time.perf_counter()
        trees = {index: step.tree for index, step in steps.items()}
        all_logits = run_together(target, [active[index] for index in trees], [*trees.values()])
        scored = time.perf_counter()
        for (index, step), logits in zip(steps.items(), all_logits):
            decoder = active[index]
            step.logits = logits
            step.draft_seconds = drafted - began
            step.target_seconds = scored - drafted
            try:
                step.accepted, step.tokens = decoder.verify(step.tree, logits)
                decoder.roll_back(step.tree, step.accepted)
                decoder.emit(step)
            except ValueError as error:
                results[index] = error
                continue
            step.seconds = time.perf_counter() - began
            decoder.stats.add(step)
            if decoder.ended:
                results[index] = decoder.result()
    for index in results:
        del active[index]
    return results


def run_together(target: Llama, decoders: list[Decoder], trees: list[Tree]) -> list[Tensor]:
    """Run the target once, over what it has not read for any Decoder: logits (N+1, V) by tree.

    Each prompt attends to its own cache, with its own mask. In the shape comments, T counts the new
    positions of all prompts.
    """
    if not trees:  # all have failed
        return []
    caches = [decoder.cache for decoder in decoders]
    inputs = [decoder.inputs(tree) for decoder, tree in zip(decoders, trees)]
    tokens, positions, masks = zip(*inputs)
    sizes = [each.shape[1] for each in tokens]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_prompt = zip(*(each.split(sizes, dim=2) for each in (q, k, v)))
        attended = []
        for (q, k, v), mask, cache in zip(by_prompt, masks, caches):
            attended.append(attention(q, *cache.update(layer, k, v), mask))
        return torch.cat(attended, dim=2)  # (1, H, T, D)

    hidden = target.embed(torch.cat(tokens, dim=1))  # (1, T, hidden)
    hidden = target.run_blocks(hidden, 0, None, torch.cat(positions), attend)
    for cache, size in zip(caches, sizes):
        cache.length += size
    counts = [len(tree.tokens) for tree in trees]
    needed = [rows[-count:] for rows, count in zip(hidden[0].split(sizes), counts)]
    return list(target.logits(torch.cat(needed)).split(counts))
