"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, in which matmuls read
every weight once; attention alone is done per prompt, on its own KV cache and with its own mask.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .decoder import Decoder, Generation
from .generation import make_decoder, resolve
from .model import Llama
from .options import Options


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
    The seconds of an answer are those of its steps, which others share. Raises ValueError for what
    cannot be run, with the prompt's number, once the prompts before it have been yielded.
    """
    finished = as_finished(target, prompts, draft, method, batch, **options)
    for number, result in enumerate(in_order(finished)):
        if isinstance(result, ValueError):
            raise ValueError(f"prompt {number}: {result}")
        yield result


def as_finished(
    target: Llama,
    prompts: Iterable[list[int]],
    draft: Llama | None = None,
    method: str | None = None,
    batch: int = 8,
    seed: int = 0,
    **options: Any,
) -> Iterator[tuple[int, Generation | ValueError]]:
    """As ``generate_many``, but yields (i, the answer to prompt i) as soon as it has ended.

    If a prompt cannot be run, its ValueError is yielded, and the others go on.
    """
    resolved = resolve(target, draft, Options(method, seed=seed, **options), batch)
    yield from decode_many(target, enumerate(prompts), draft, resolved, batch)


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
    options: Options,
    batch: int,
) -> Iterator[tuple[int, Generation | ValueError]]:
    """``as_finished`` for resolved ``options`` and pairs (i, prompt)."""
    active: dict[int, Decoder] = {}
    for index, prompt in prompts:
        own = replace(options, seed=options.seed + index)
        try:
            active[index] = make_decoder(target, prompt, draft, own)
        except ValueError as error:
            yield index, error
        while len(active) == batch:
            yield from run_step(target, active)
    while active:
        yield from run_step(target, active)


def run_step(target: Llama, active: dict[int, Decoder]) -> list[tuple[int, Generation]]:
    """A Step of each of ``active`` {i: Decoder}; those that end leave it and are returned."""
    decoders = list(active.values())
    with torch.inference_mode():
        trees = [decoder.draft() for decoder in decoders]
        inputs = [decoder.inputs(tree) for decoder, tree in zip(decoders, trees)]
        for decoder, tree, logits in zip(decoders, trees, run_together(target, inputs)):
            decoder.accept(tree, logits)
    ended = [index for index, decoder in active.items() if decoder.ended]
    return [(index, active.pop(index).result()) for index in ended]


def run_together(target: Llama, inputs: list[dict[str, Any]]) -> list[Tensor]:
    """One pass of ``target`` over the ``inputs`` of several Decoders: logits (N+1, V) of each."""
    cache = JoinedCache(inputs)
    hidden = target.embed(torch.cat([each["tokens"] for each in inputs], dim=1))
    hidden = target.run_layers(hidden, positions=cache.positions, cache=cache)[0]  # (all T, hidden)
    rows = [part[-each["last"] :] for part, each in zip(hidden.split(cache.sizes), inputs)]
    return target.logits(torch.cat(rows)).split([len(part) for part in rows])


class JoinedCache:
    """The KV caches of several prompts as one: each attends to its own part."""

    length = 0  # of what all positions share

    def __init__(self, inputs: list[dict[str, Any]]) -> None:
        self.inputs = inputs
        self.sizes = [each["tokens"].shape[1] for each in inputs]
        positions = []
        for each, size in zip(inputs, self.sizes):
            S = each["cache"].length
            follow = torch.arange(S, S + size, device=each["tokens"].device)
            positions.append(follow if each["positions"] is None else each["positions"])
        self.positions = torch.cat(positions)

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        parts = zip(self.inputs, *(heads.split(self.sizes, dim=2) for heads in (q, k, v)))
        attended = [
            each["cache"].store_and_attend(layer, *qkv, each["mask"]) for each, *qkv in parts
        ]
        return torch.cat(attended, dim=2)

    def advance(self, count: int) -> None:
        for each, size in zip(self.inputs, self.sizes):
            each["cache"].advance(size)
