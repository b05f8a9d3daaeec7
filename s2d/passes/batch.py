"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. A long prompt is read alone, before its first step. Then the new
positions of all prompts are one row, for which matmuls read every weight once. Only attention is
computed per prompt, on its own KV cache and with its own mask.
"""

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from ..decoder import Decoder
from ..generation import Ids, decide, make_decoder
from ..mask import Inputs, unread
from ..model import KVCache, Llama
from ..options import Options, expect
from ..stats import Generation
from ..tree import Tree

Asked = tuple[Decoder, Tree]  # a prompt asks for a pass over a tree
Output = tuple[Tensor, Tensor]  # and is sent hidden states and logits: see ``Decoder.run_target``


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
    seeded = (replace(options, seed=seed) for seed in count(options.seed))
    begun = (decode_one(target, prompt, draft, own) for prompt, own in zip(prompts, seeded))
    waiting = enumerate(begun)
    active: list[tuple[int, Generator]] = []
    results: dict[int, Generation | ValueError] = {}
    turn = 0  # the number of the answer that is yielded next
    while True:
        while turn in results:  # between two steps: no answer's clock runs
            yield results.pop(turn)
            turn += 1
        asked: list[Asked] = []
        taking_part = []
        for number, prompt in chain(active, waiting):  # each drafts a tree
            try:
                asked.append(next(prompt))
                taking_part.append((number, prompt))
            except StopIteration as end:
                results[number] = end.value
            if len(asked) == batch:
                break
        active = []
        if not asked and turn not in results:
            return
        outputs = run_together(target, asked) if asked else []
        del asked  # or it keeps the caches of answers that end now
        for (number, prompt), output in zip(taking_part, outputs):  # each verifies its tree
            try:
                prompt.send(output)
                active.append((number, prompt))
            except StopIteration as end:
                results[number] = end.value


@torch.inference_mode()
def decode_one(
    target: Llama, prompt: Ids, draft: Llama | None, options: Options
) -> Generator[Asked | None, Output | None, Generation | ValueError]:
    """``Decoder.decode`` of one prompt, for a pass that others share.

    A step yields twice: the Decoder and its tree, for which it is sent what the pass gives; and
    None when it ends. Returns the answer, or the ValueError of a prompt that cannot be run.
    """
    try:
        decoder = make_decoder(target, prompt, draft, options)
        if type(decoder).run_target is not Decoder.run_target:
            raise ValueError("a decoder that makes its own pass goes with a single prompt")
        while True:
            began = time.perf_counter()
            tree = decoder.draft()
            hidden, logits = yield decoder, tree
            decoder.finish(tree, hidden, logits, began)
            if decoder.ended:
                return decoder.result()
            yield None
    except ValueError as error:
        return error.with_traceback(None)  # which would keep the caches


@torch.inference_mode()
def run_together(target: Llama, asked: list[Asked]) -> list[Output]:
    """Run the target once, over what it has not read: as ``Decoder.run_target`` for each tree."""
    long_prompts = []
    last: list[Inputs] = []
    like = target.model.norm.weight
    for decoder, tree in asked:
        *before, inputs = unread(tree.context, tree.nodes, decoder.cache.length, like)
        long_prompts.append([decoder.read(prompt) for prompt in before])
        last.append(inputs)
    tokens = torch.cat([inputs.tokens for inputs in last], dim=1)  # (1, T), T of all prompts
    positions = torch.cat([inputs.positions for inputs in last])
    cache = SeveralCaches(target, [decoder.cache for decoder, _ in asked], last)
    hidden = target.run_layers(target.embed(tokens), positions=positions, cache=cache)
    states = hidden[0].split(cache.sizes)
    needed = [rows[-len(tree.nodes) :] for rows, (_, tree) in zip(states, asked)]
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
            target.mask_by_head(each.mask, cache.length, size, like=cache.memory)
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
