"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, in which matmuls read
every weight once; attention alone is done per prompt, on its own KV cache and with its own mask.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..decoder import Decoder, refuse_infinite
from ..generation import start
from ..model import Llama, attend
from ..options import Options, make_options
from ..stats import Clock, Generation
from ..tree import Tree


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
    asked = make_options(method=method, **options)
    for number, result in enumerate(decode_many(target, prompts, draft, asked, batch)):
        if isinstance(result, ValueError):
            raise ValueError(f"prompt {number}: {result}")
        yield result


def decode_many(
    target: Llama, prompts: Iterable[list[int]], draft: Llama | None, options: Options, batch: int
) -> Iterator[Generation | ValueError]:
    """Yield the answer to each prompt, in order. Of a prompt that cannot be run, its ValueError."""
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch: expected a whole number from 1, got {batch!r}")
    numbered = enumerate(prompts)
    active: dict[int, Decoder] = {}
    results: dict[int, Generation | ValueError] = {}  # what may be yielded, or waits for its turn
    number = 0  # of the prompt whose turn it is
    while True:
        for index, prompt in islice(numbered, batch - len(active)):
            own_options = replace(options, seed=options.seed + index)
            try:
                active[index] = start(target, prompt, draft, **vars(own_options))
            except ValueError as error:
                results[index] = error
        if active:
            results |= run_step(target, active)
        elif not results:
            return
        while number in results:
            yield results.pop(number)
            number += 1


def run_step(target: Llama, active: dict[int, Decoder]) -> dict[int, Generation]:
    """A step of every Decoder of ``active``; answers that end leave it, and are returned.

    The parts of a step are those of ``Decoder.__iter__``.
    """
    decoders = list(active.values())
    with torch.inference_mode():
        clock = Clock()
        trees = [decoder.draft() for decoder in decoders]
        clock.lap()
        all_logits = run_together(target, decoders, trees)
        clock.lap()
        for decoder, tree, logits in zip(decoders, trees, all_logits):
            refuse_infinite(logits)
            accepted, tokens = decoder.verify(tree, logits)
            decoder.roll_back(tree, accepted)
            decoder.emit(tree, logits, accepted, tokens, clock)
    ended = [index for index, decoder in active.items() if decoder.ended]
    return {index: active.pop(index).result() for index in ended}


def run_together(target: Llama, decoders: list[Decoder], trees: list[Tree]) -> list[Tensor]:
    """Run the target once, over what it has not read for any Decoder: logits (N+1, V) by tree.

    This is ``Llama.forward``, but each prompt attends to its own cache, with its own mask. In the
    shape comments, T counts the new positions of all prompts.
    """
    caches = [decoder.cache for decoder in decoders]
    inputs = [decoder.inputs(tree) for decoder, tree in zip(decoders, trees)]
    sizes = [tokens.shape[1] for tokens, _, _ in inputs]
    ropes = []
    for cache, size, (_, positions, _) in zip(caches, sizes, inputs):
        end = cache.length + size
        where = slice(cache.length, end) if positions is None else positions
        ropes.append(target.rope(where, end))
    cos, sin = (torch.cat(tables) for tables in zip(*ropes))  # (T, D) each
    tokens = torch.cat([tokens for tokens, _, _ in inputs], dim=1)  # (1, T)
    hidden = target.embed(tokens)  # (1, T, hidden)
    for layer, block in enumerate(target.model.layers):
        heads = block.self_attn.heads(block.input_layernorm(hidden), (cos, sin))
        by_prompt = zip(*(each.split(sizes, dim=2) for each in heads))
        attended = []
        for (q, k, v), (_, _, mask), cache in zip(by_prompt, inputs, caches):
            k, v = cache.update(layer, k, v)
            attended.append(attend(q, k, v, mask))
        hidden = hidden + block.self_attn.output(torch.cat(attended, dim=2))
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    for cache, size in zip(caches, sizes):
        cache.advance(size)
    counts = [len(tree.tokens) for tree in trees]
    needed = [rows[-count:] for rows, count in zip(hidden[0].split(sizes), counts)]
    return list(target.logits(torch.cat(needed)).split(counts))
