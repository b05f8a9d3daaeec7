"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, in which matmuls read
every weight once; attention alone is done per prompt, on its own KV cache and with its own mask.
"""

from collections.abc import Iterable, Iterator

import torch

from ..decode import Decoder
from ..generate import start


def generate_many(
    target, prompts: Iterable, draft=None, method="s2d", batch=8, seeds=None, **options
) -> Iterator[Decoder]:
    """Continue each of ``prompts`` as ``generate`` would; yields the Decoders in their order.

    ``batch`` prompts are decoded at a time, and the next one begins where one ends. Prompt i has
    the seed i of ``seeds``, by default ``seed`` + i: its text is that of ``generate`` with this
    seed, but for rounding below float64. The seconds of a Decoder are those of its steps, which
    others share. Raises ValueError for what cannot be run, with the prompt's number, once the
    prompts before it have been yielded.
    """
    ended, number = {}, 0
    for index, result in as_finished(target, prompts, draft, method, batch, seeds, **options):
        ended[index] = result
        while number in ended:
            result = ended.pop(number)
            if isinstance(result, ValueError):
                raise ValueError(f"prompt {number}: {result}")
            yield result
            number += 1


def as_finished(
    target, prompts, draft=None, method="s2d", batch=8, seeds=None, **options
) -> Iterator[tuple[int, Decoder | ValueError]]:
    """As ``generate_many``, but yields (i, the Decoder of prompt i) as soon as it has ended.

    Where a prompt cannot be run, its ValueError is yielded, and the others go on.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    seed = options.pop("seed", 0)
    seeds = iter(seeds) if seeds is not None else None
    active = {}
    for index, prompt in enumerate(prompts):
        own_seed = seed + index if seeds is None else next(seeds)
        try:
            active[index] = start(target, prompt, draft, method, seed=own_seed, **options)
        except ValueError as error:
            yield index, error
        while len(active) == batch:
            yield from run_step(target, active)
    while active:
        yield from run_step(target, active)


@torch.inference_mode()
def run_step(target, active: dict) -> list:
    """A Step of each of ``active`` {i: Decoder}; those that end leave it and are returned."""
    inputs, ended = {}, []
    for index, decoder in active.items():
        try:
            inputs[index] = decoder.draft()
        except ValueError as error:  # such as a damaged draft
            ended.append((index, error))
    for index, logits in zip(inputs, run_together(target, list(inputs.values()))):
        try:
            active[index].accept(logits)
        except ValueError as error:
            ended.append((index, error))
        else:
            if active[index].ended:
                ended.append((index, active[index]))
    for index, _ in ended:
        del active[index]
    return ended


def run_together(target, inputs: list) -> list:
    """One pass of ``target`` over the ``inputs`` of several Decoders: logits (N+1, V) of each."""
    if not inputs:
        return []
    cache = JoinedCache(inputs)
    hidden = target.embed(
        torch.cat([each["tokens"] for each in inputs], dim=1)
    )  # (1, all T, hidden)
    hidden = target.run_layers(hidden, positions=cache.positions, cache=cache)[0]
    rows = [part[-each["last"] :] for part, each in zip(hidden.split(cache.sizes), inputs)]
    return target.logits(torch.cat(rows)).split([len(part) for part in rows])


class JoinedCache:
    """The KV caches of several prompts as one: each attends to its own part."""

    length = 0  # of what all positions share

    def __init__(self, inputs):
        self.inputs = inputs
        self.sizes = [each["tokens"].shape[1] for each in inputs]
        positions = []
        for each, size in zip(inputs, self.sizes):
            S = each["cache"].length
            follow = torch.arange(S, S + size, device=each["tokens"].device)
            positions.append(follow if each["positions"] is None else each["positions"])
        self.positions = torch.cat(positions)

    def attend(self, layer, q, k, v, mask):
        parts = zip(self.inputs, *(heads.split(self.sizes, dim=2) for heads in (q, k, v)))
        attended = [each["cache"].attend(layer, *qkv, each["mask"]) for each, *qkv in parts]
        return torch.cat(attended, dim=2)

    def advance(self, count):
        for each, size in zip(self.inputs, self.sizes):
            each["cache"].advance(size)
