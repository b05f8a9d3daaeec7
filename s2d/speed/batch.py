"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, for which matmuls read
every weight once. Only attention is computed per prompt, on its own KV cache and with its own mask.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import KVCache, LayerCache, NoCache
from ..decoder import Decoder
from ..generation import make_decoder
from ..model import Llama
from ..options import Options, decide, expect
from ..stats import Generation
from ..tree import Tree

Pass = tuple[Tensor, Tensor]  # what ``Decoder.run_target`` returns: hidden states and logits
Loop = Generator[tuple[Decoder, Tree], Pass | None, Generation]  # see ``decode``


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
    expect(isinstance(batch, int) and batch > 0, "batch: expected a whole number from 1", batch)
    fresh = (
        (number, decode(target, prompt, draft, replace(options, seed=options.seed + number)), None)
        for number, prompt in enumerate(prompts)
    )
    active: list[tuple[int, Loop, Pass]] = []  # prompts by number, and what their loops are sent
    results: dict[int, Generation | ValueError] = {}  # they wait for the turn of their prompts
    turn = 0
    while True:
        loops = []
        trees = []  # of the next pass, with their Decoders
        with torch.inference_mode():
            for number, loop, sent in chain(active, fresh):
                try:
                    trees.append(loop.send(sent))
                    loops.append((number, loop))
                except StopIteration as end:
                    results[number] = end.value
                except ValueError as error:
                    results[number] = error
                if len(loops) == batch:
                    break
        while turn in results:
            yield results.pop(turn)
            turn += 1
        if not trees:
            return
        passes = run_together(target, trees)
        active = [(*each, sent) for each, sent in zip(loops, passes)]


def decode(target: Llama, prompt: list[int], draft: Llama | None, options: Options) -> Loop:
    """``Decoder.decode``, but the trees are yielded, and the target's passes are sent."""
    decoder = make_decoder(target, prompt, draft, options)
    while not decoder.ended:
        began = time.perf_counter()
        tree = decoder.draft()
        hidden, logits = yield decoder, tree
        accepted, bonus = decoder.rule.verify(tree, logits)
        step = decoder.emit(tree, logits, hidden, accepted, bonus)
        decoder.roll_back(step)
        step.seconds = time.perf_counter() - began
        decoder.stats.add(step)
    decoder.end()
    return decoder.result()


@torch.inference_mode()
def run_together(target: Llama, trees: list[tuple[Decoder, Tree]]) -> list[Pass]:
    """Run the target once, over what it has not read for any Decoder: a Pass for each tree."""
    long_prompts = [decoder.read_long_prompt() for decoder, _ in trees]
    inputs = [decoder.inputs(tree) for decoder, tree in trees]
    tokens, positions, masks = zip(*inputs)
    sizes = [each.shape[1] for each in tokens]
    cache = SeveralCaches([decoder.cache for decoder, _ in trees], sizes, masks)
    hidden = target.embed(torch.cat(tokens, dim=1))  # (1, T, hidden), T of all prompts
    hidden = target.run_layers(hidden, positions=torch.cat(positions), cache=cache)
    states = hidden[0].split(sizes)
    needed = [rows[-len(tree.tokens) :] for rows, (_, tree) in zip(states, trees)]
    logits = target.logits(torch.cat(needed)).split([len(rows) for rows in needed])
    states = [torch.cat((*before, rows)) for before, rows in zip(long_prompts, states)]
    return list(zip(states, logits))


class SeveralLayers(NamedTuple):
    """What a layer is handed: its part of each prompt's cache, and each prompt's own mask."""

    parts: Sequence[LayerCache]
    sizes: list[int]  # new positions of each prompt; their sum is T
    masks: Sequence[Tensor | None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        """As ``LayerCache.attend``, for all prompts: (1, H, T, D)."""
        by_prompt = zip(*(each.split(self.sizes, dim=2) for each in (q, k, v)))
        prompts = zip(self.parts, by_prompt, self.masks)
        return torch.cat([part.attend(*new, mask) for part, new, mask in prompts], dim=2)


class SeveralCaches(NoCache):
    """The caches of several prompts in the place of one: each prompt attends to its own."""

    def __init__(
        self, caches: list[KVCache], sizes: list[int], masks: Sequence[Tensor | None]
    ) -> None:
        for cache, size in zip(caches, sizes):
            cache.extend(size)
        layers = zip(*(cache.layers for cache in caches))
        self.layers = [SeveralLayers(parts, sizes, masks) for parts in layers]
