"""Several prompts at once, each as if it were alone: their target passes are made as one.

Nothing is padded or aligned. The new positions of all prompts are one row, in which matmuls read
every weight once; attention alone is done per prompt, on its own KV cache and with its own mask.
"""

import torch

from ..generate import start


def generate_many(target, prompts, draft=None, method="s2d", batch=8, **options):
    """Continue each of ``prompts`` as ``generate`` would; yields their Decoders in order.

    ``prompts`` is an iterable of lists of ids. ``batch`` of them are decoded at a time, and the
    next one begins where one ends. Prompt i has ``seed`` + i: its text is that of ``generate`` with
    this seed, but for rounding below float64. The seconds of a Decoder are those of its steps,
    which others share. Raises ValueError for what cannot be run, with the prompt's number, once the
    prompts before it have been yielded.
    """
    ended, number = {}, 0
    for index, result in as_finished(target, prompts, draft, method, batch, **options):
        ended[index] = result
        while number in ended:
            result = ended.pop(number)
            if isinstance(result, ValueError):
                raise ValueError(f"prompt {number}: {result}")
            yield result
            number += 1


def as_finished(target, prompts, draft=None, method="s2d", batch=8, seed=0, **options):
    """As ``generate_many``, but yields (i, the Decoder of prompt i) as soon as it has ended.

    Where a prompt cannot be run, its ValueError is yielded, and the others go on.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    active = {}
    for index, prompt in enumerate(prompts):
        try:
            active[index] = start(target, prompt, draft, method, seed=seed + index, **options)
        except ValueError as error:
            yield index, error
        while len(active) == batch:
            yield from run_step(target, active)
    while active:
        yield from run_step(target, active)


@torch.inference_mode()
def run_step(target, active: dict) -> list:
    """A Step of each of ``active`` {i: Decoder}; those that end leave it and are returned."""
    inputs = [decoder.draft() for decoder in active.values()]
    for decoder, logits in zip(active.values(), run_together(target, inputs)):
        decoder.accept(logits)
    ended = [index for index, decoder in active.items() if decoder.ended]
    return [(index, active.pop(index)) for index in ended]


def run_together(target, inputs: list) -> list:
    """One pass of ``target`` over the ``inputs`` of several Decoders: logits (N+1, V) of each."""
    cache = JoinedCache(inputs)
    hidden = target.embed(torch.cat([each["tokens"] for each in inputs], dim=1))
    hidden = target.run_layers(hidden, positions=cache.positions, cache=cache)[0]  # (all T, hidden)
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
