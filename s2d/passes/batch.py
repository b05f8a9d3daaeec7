"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, for which matmuls read
every weight once. Only attention is computed per prompt, on its own KV cache and with its own mask.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..decoder import Decoder
from ..generation import Ids, decide, make_decoder
from ..mask import Inputs
from ..model import KVCache, Llama
from ..options import Options, expect
from ..stats import Generation
from ..tree import Tree

# By the numbers of their prompts: what waits to be yielded.
Results = dict[int, Generation | ValueError]


class Drafted(NamedTuple):
    """A prompt that takes part in the next pass."""

    number: int
    decoder: Decoder
    tree: Tree
    began: float  # by ``time.perf_counter``


def generate_many(
    target: Llama,
    prompts: Iterable[Ids],
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
    target: Llama, prompts: Iterable[Ids], draft: Llama | None, options: Options, batch: int
) -> Iterator[Generation | ValueError]:
    """Yield the answer to each prompt, in order. Of a prompt that cannot be run, its ValueError."""
    expect(isinstance(batch, int) and batch > 0, "batch: expected a whole number from 1", batch)
    results: Results = {}
    turn = 0
    fresh = begin(target, prompts, draft, options, results)
    active: list[tuple[int, Decoder]] = []
    while True:
        drafted = draft_trees(chain(active, fresh), batch, results)
        while turn in results:
            yield results.pop(turn)
            turn += 1
        if not drafted:
            return
        active = finish_steps(target, drafted, results)
        del drafted  # the caches of answers that have ended, before new ones are made


def begin(
    target: Llama, prompts: Iterable[Ids], draft: Llama | None, options: Options, results: Results
) -> Iterator[tuple[int, Decoder]]:
    """Yield the number and the Decoder of each of ``prompts`` when it is asked for."""
    for number, prompt in enumerate(prompts):
        with keep_error(number, results):
            seeded = replace(options, seed=options.seed + number)
            decoder = make_decoder(target, prompt, draft, seeded)
            if type(decoder).run_target is not Decoder.run_target:
                raise ValueError("a decoder that makes its own pass goes with a single prompt")
            yield number, decoder
            del decoder  # as above


@contextmanager
def keep_error(number: int, results: Results) -> Iterator[None]:
    """A ValueError is the result of its prompt; the others go on."""
    try:
        yield
    except ValueError as error:
        results[number] = error


@torch.inference_mode()
def draft_trees(
    decoders: Iterable[tuple[int, Decoder]], batch: int, results: Results
) -> list[Drafted]:
    """The trees of the next pass, by up to ``batch`` Decoders."""
    drafted: list[Drafted] = []
    for number, decoder in decoders:
        began = time.perf_counter()
        with keep_error(number, results):
            drafted.append(Drafted(number, decoder, decoder.draft(), began))
        if len(drafted) == batch:
            break
    return drafted


@torch.inference_mode()
def finish_steps(
    target: Llama, drafted: list[Drafted], results: Results
) -> list[tuple[int, Decoder]]:
    """Make the pass, and finish the step of each prompt; returns the prompts that go on."""
    active = []
    outputs = run_together(target, drafted)
    for (number, decoder, tree, began), (hidden, logits) in zip(drafted, outputs):
        with keep_error(number, results):
            decoder.finish(tree, hidden, logits, began)
            if decoder.ended:
                results[number] = decoder.result()
            else:
                active.append((number, decoder))
    return active


def run_together(target: Llama, drafted: list[Drafted]) -> list[tuple[Tensor, Tensor]]:
    """Run the target once, over what it has not read: as ``Decoder.run_target`` for each tree."""
    long_prompts = []
    last: list[Inputs] = []
    for each in drafted:
        *before, inputs = each.decoder.unread(each.tree)
        long_prompts.append([each.decoder.read(prompt) for prompt in before])
        last.append(inputs)
    tokens = torch.cat([inputs.tokens for inputs in last], dim=1)  # (1, T), T of all prompts
    positions = torch.cat([inputs.positions for inputs in last])
    cache = SeveralCaches(target, [each.decoder.cache for each in drafted], last)
    hidden = target.run_layers(target.embed(tokens), positions=positions, cache=cache)
    states = hidden[0].split(cache.sizes)
    needed = [rows[-len(each.tree.nodes) :] for rows, each in zip(states, drafted)]
    logits = target.logits(torch.cat(needed)).split([len(rows) for rows in needed])
    states = [torch.cat((*before, rows)) for before, rows in zip(long_prompts, states)]
    return list(zip(states, logits))


class SeveralCaches:
    """The caches of several prompts in the place of one: each prompt attends to its own."""

    length = 0

    def __init__(self, target: Llama, caches: list[KVCache], inputs: list[Inputs]) -> None:
        self.caches = caches
        self.sizes = [each.tokens.shape[1] for each in inputs]  # new entries of each prompt
        self.masks = [
            target.mask_by_head(each.mask, cache.length, size, like=cache.keys)
            for each, cache, size in zip(inputs, caches, self.sizes)
        ]

    def extend(self, T: int) -> None:
        """As ``KVCache.extend``: ``T`` is the sum of the prompts' new entries."""
        for cache, size in zip(self.caches, self.sizes):
            cache.extend(size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        """As ``KVCache.attend``, for all prompts: (1, T, H·D)."""
        by_prompt = zip(*(each.split(self.sizes, dim=2) for each in (q, k, v)))
        prompts = zip(self.caches, by_prompt, self.masks)
        return torch.cat([cache.attend(layer, *new, mask) for cache, new, mask in prompts], dim=1)
