"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, in which matmuls read
every weight once; attention alone is done per prompt, on its own KV cache and with its own mask.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import KVCache, LayerCache
from ..decoder import Decoder
from ..generation import make_decoder
from ..model import Llama
from ..options import Options, decide
from ..stats import Generation
from ..tree import Tree

MAX_BATCH = 1024  # prompts in a pass


def generate_many(
    target: Llama,
    prompts: Iterable[list[int]],
    draft: Llama | None = None,
    batch: int = 8,
    **options: Any,
) -> Iterator[Generation]:
    """Continue each of ``prompts`` as ``generate`` would; yields the answers in order.

    ``batch`` prompts are decoded at a time, and the next one begins when one ends. Prompt i has
    ``seed`` + i: its text is what ``generate`` writes with this seed, up to rounding. The seconds
    of an answer are those of its steps, which other prompts share. Raises what ``generate`` raises;
    the answers before a prompt that cannot be run are yielded first.
    """
    decided = decide(draft, **options)
    for number, result in enumerate(decode_many(target, prompts, draft, decided, batch)):
        if isinstance(result, ValueError):
            raise ValueError(f"prompt {number}: {result}")
        yield result


def decode_many(
    target: Llama, prompts: Iterable[list[int]], draft: Llama | None, options: Options, batch: int
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
            own = replace(options, seed=options.seed + index)
            try:
                active[index] = make_decoder(target, prompt, draft, own)
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

    The parts of a step are those of ``Decoder.decode``.
    """
    results: dict[int, Generation | ValueError] = {}
    with torch.inference_mode():
        began = time.perf_counter()
        trees = {}
        for index, decoder in active.items():
            try:
                trees[index] = decoder.draft()
            except ValueError as error:
                results[index] = error
        passes = run_together(target, [active[index] for index in trees], [*trees.values()])
        for (index, tree), (hidden, logits) in zip(trees.items(), passes):
            decoder = active[index]
            try:
                accepted, bonus = decoder.rule.verify(tree, logits)
                step = decoder.emit(tree, logits, hidden, accepted, bonus)
                decoder.roll_back(step)
            except ValueError as error:
                results[index] = error
                continue
            step.seconds = time.perf_counter() - began
            decoder.stats.add(step)
            if decoder.ended:
                decoder.end()
                results[index] = decoder.result()
    for index in results:
        del active[index]
    return results


def run_together(
    target: Llama, decoders: list[Decoder], trees: list[Tree]
) -> list[tuple[Tensor, Tensor]]:
    """Run the target once, over what it has not read for any Decoder.

    Returns for each tree what ``Decoder.run_target`` does: hidden states (T, hidden) and logits
    (N+1, V).
    """
    if not trees:  # all have failed
        return []
    inputs = [decoder.inputs(tree) for decoder, tree in zip(decoders, trees)]
    tokens, positions, masks = zip(*inputs)
    sizes = [each.shape[1] for each in tokens]
    cache = SeveralCaches([decoder.cache for decoder in decoders], sizes, masks)
    hidden = target.embed(torch.cat(tokens, dim=1))  # (1, T, hidden), T of all prompts
    hidden = target.run_layers(hidden, positions=torch.cat(positions), cache=cache)
    states = hidden[0].split(sizes)
    counts = [len(tree.tokens) for tree in trees]
    needed = [rows[-count:] for rows, count in zip(states, counts)]
    return list(zip(states, target.logits(torch.cat(needed)).split(counts)))


class SeveralLayers(NamedTuple):
    """What a layer is handed: its part of each prompt's cache, and each prompt's own mask."""

    parts: Sequence[LayerCache]
    sizes: list[int]  # new positions of each prompt; their sum is T
    masks: Sequence[Tensor | None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        """As ``LayerCache.attend``, for all prompts: (1, H, T, D)."""
        by_prompt = zip(*(each.split(self.sizes, dim=2) for each in (q, k, v)))
        attended = []
        for part, (q, k, v), mask in zip(self.parts, by_prompt, self.masks):
            attended.append(part.attend(q, k, v, mask))
        return torch.cat(attended, dim=2)


class SeveralCaches:
    """The caches of several prompts in the place of one: each prompt attends to its own."""

    length = 0  # of what all prompts share

    def __init__(
        self, caches: list[KVCache], sizes: list[int], masks: Sequence[Tensor | None]
    ) -> None:
        self.caches = caches
        self.sizes = sizes
        layers = zip(*(cache.layers for cache in caches))
        self.layers = [SeveralLayers(parts, sizes, masks) for parts in layers]

    def extend(self, T: int) -> None:
        for cache, size in zip(self.caches, self.sizes):
            cache.extend(size)
