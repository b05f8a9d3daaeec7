"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, in which matmuls read
every weight once; attention alone is done per prompt, on its own KV cache and with its own mask.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .cache import KVCache
from .decoder import Decoder, Generation, Inputs, inference
from .generation import make_decoder, settings_for
from .model import Llama, attend
from .options import Options, Settings


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
    ``seed`` + i: its text is that of ``generate`` with this seed, but for rounding below float64.
    The seconds of an answer are those of its steps, which others share. An exit or a rule of your
    own is one object for all prompts, so it must keep nothing between calls. Raises ValueError for
    a prompt that cannot be started, with its number, once those before it have been yielded; and
    for options that cannot be run, and damaged weights.
    """
    settings = settings_for(target, draft, Options(method, **options), batch)
    finished = decode_many(target, enumerate(prompts), draft, settings, batch)
    for number, result in enumerate(in_order(finished)):
        if isinstance(result, ValueError):
            raise ValueError(f"prompt {number}: {result}")
        yield result


def in_order(
    finished: Iterable[tuple[int, Generation | ValueError]],
) -> Iterator[Generation | ValueError]:
    """The results of pairs (i, result), i from 0, each as soon as all before it are there."""
    waiting: dict[int, Generation | ValueError] = {}
    number = 0
    for index, result in finished:
        waiting[index] = result
        while number in waiting:
            yield waiting.pop(number)
            number += 1


def decode_many(
    target: Llama,
    prompts: Iterable[tuple[int, list[int]]],
    draft: Llama | None,
    settings: Settings,
    batch: int,
    make: Callable[..., Decoder] = make_decoder,
) -> Iterator[tuple[int, Generation | ValueError]]:
    """From pairs (i, prompt), yield (i, the answer) as soon as it has ended.

    If a prompt cannot be run, its ValueError is yielded, and the others go on. ``make``: see
    ``make_decoder``.
    """
    active: dict[int, Decoder] = {}
    for index, prompt in prompts:
        own = replace(settings, seed=settings.seed + index)
        try:
            active[index] = make(target, prompt, draft, own)
        except ValueError as error:
            yield index, error
        while len(active) == batch:
            yield from run_step(target, active)
    while active:
        yield from run_step(target, active)


def run_step(target: Llama, active: dict[int, Decoder]) -> list[tuple[int, Generation]]:
    """A Step of each of ``active`` {i: Decoder}; those that end leave it and are returned."""
    decoders = list(active.values())
    with inference(target.device):
        trees = [decoder.draft() for decoder in decoders]
        inputs = [decoder.inputs(tree) for decoder, tree in zip(decoders, trees)]
        caches = [decoder.cache for decoder in decoders]
        logits = run_together(target, inputs, caches)
        for decoder, tree, own in zip(decoders, trees, logits):
            decoder.accept(tree, own)
    ended = [index for index, decoder in active.items() if decoder.ended]
    return [(index, active.pop(index).result()) for index in ended]


def run_together(target: Llama, inputs: list[Inputs], caches: list[KVCache]) -> list[Tensor]:
    """One pass of ``target`` over the ``inputs`` of several Decoders: logits (last, V) of each.

    As ``Llama.forward``, but attention alone is computed for each prompt, on its own cache.
    """
    sizes = [each.tokens.shape[1] for each in inputs]
    positions = torch.cat([positions_of(each, cache) for each, cache in zip(inputs, caches)])
    rope = target.rope(positions)  # (all T, D) each
    hidden = target.embed(torch.cat([each.tokens for each in inputs], dim=1))  # (1, all T, hidden)
    for layer, block in enumerate(target.model.layers):
        attention = block.self_attn
        heads = attention.heads(block.input_layernorm(hidden), rope)
        parts = zip(inputs, caches, *(rows.split(sizes, dim=2) for rows in heads))
        attended = []
        for each, cache, q, k, v in parts:
            k, v = cache.update(layer, k, v)
            attended.append(attend(q, k, v, each.mask))
        hidden = hidden + attention.output(torch.cat(attended, dim=2))
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    for cache, size in zip(caches, sizes):
        cache.advance(size)
    rows = [part[-each.last :] for part, each in zip(hidden[0].split(sizes), inputs)]
    return target.logits(torch.cat(rows)).split([len(part) for part in rows])


def positions_of(inputs: Inputs, cache: KVCache) -> Tensor:
    if inputs.positions is not None:
        return inputs.positions
    end = cache.length + inputs.tokens.shape[1]
    return torch.arange(cache.length, end, device=inputs.tokens.device)
