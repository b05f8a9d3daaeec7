"""Several prompts at once, each as if it were alone: their passes go through the target as one.

Knows nothing about trees. All new positions are one row, in which products read every weight
once. Attention alone is done prompt by prompt, on its own KV cache: nothing is padded or aligned.
"""

from dataclasses import replace
from itertools import count

import torch
from torch.nn.attention import sdpa_kernel

from ..decode import checked
from ..generate import Options, begin, ready_plan, refuse
from ..model import DECODING_KERNELS, whole_mask


def generate_many(target, prompts, draft=None, method="s2d", batch=8, seeds=None, **options):
    """Continue each of ``prompts`` as ``generate`` would; yields the Generations in their order.

    Of ``prompts``, any iterable, ``batch`` are in the making; one that ends makes room for the
    next. Prompt i has seed + i, or the i-th of a list ``seeds``: its text is ``generate``'s with
    that seed, but for rounding below float64. ``options``: see Options. A Generation's seconds are
    those of its steps, which others share. Raises ValueError for anything that cannot be run; if
    that is one prompt, with its number, once those before it have been yielded.
    """
    ended, number = {}, 0
    for index, each in as_finished(target, prompts, draft, method, batch, seeds, **options):
        ended[index] = each
        while number in ended:
            if isinstance(ended[number], ValueError):
                raise ValueError(f"prompt {number}: {ended[number]}")
            yield ended.pop(number)
            number += 1


def as_finished(target, prompts, draft=None, method="s2d", batch=8, seeds=None, **options):
    """As ``generate_many``, but yields (i, the Generation of prompt i) as soon as that has ended.

    Where a prompt cannot be run, a ValueError stands for its Generation; the others go on.
    """
    options, batch = Options(method, **options), checked(batch, "batch", int, 1)
    if hasattr(prompts, "__len__"):
        batch = max(1, min(batch, len(prompts)))
    if seeds is not None:
        prompts, seeds = list(prompts), list(seeds)
        refuse(len(prompts) != len(seeds), f"{len(prompts)} prompts, but {len(seeds)} seeds")
    plan = ready_plan(options, target, draft, batch)

    def begun():
        for prompt, seed in zip(prompts, count(int(options.seed)) if seeds is None else seeds):
            try:
                own = replace(plan, options=replace(options, seed=seed))
                each = begin(own, target, prompt, draft)
            except ValueError as error:
                each = error
            yield each

    return together(target, draft, begun(), batch)


def together(target, draft, generations, batch):
    """(i, the i-th of ``generations``) as each ends; the next begins where there is room for it."""
    alone = "take one prompt at a time: use generate, or load the models without"
    for model in filter(None, (target, draft)):
        refuse(model.compiled or model.mesh, f"compiled passes and several processes {alone}")
    going = {}
    for index, each in enumerate(generations):
        if isinstance(each, ValueError):
            yield index, each
        else:
            going[index] = each
        while len(going) == batch:
            yield from advance(target, going)
    while going:
        yield from advance(target, going)


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def advance(target, going):
    """A Step of each of ``going``, {i: Generation}; those that end leave it and are returned.

    What goes wrong with one, such as a damaged draft, is returned in its place.
    """
    passes, ended = {}, {}
    for index, each in going.items():
        try:
            passes[index] = next(each.loop)
        except ValueError as error:
            ended[index] = error
    for index, logits in zip(passes, run_together(target, [*passes.values()]) if passes else ()):
        try:
            going[index].add(going[index].loop.send(logits))
        except ValueError as error:
            ended[index] = error
    ended |= {i: each for i, each in going.items() if each.ended and i not in ended}
    for index in ended:
        going.pop(index).loop.close()  # and with it go its KV caches
    return ended.items()


def run_together(target, passes):
    """As ``run_pass`` of decode.py, but of several Passes, as one: the logits of each."""
    hidden = target.embed(torch.cat([each.tokens for each in passes])[None])  # (1, all T, hidden)
    caches = Caches(passes, hidden)
    hidden = target.run_layers(hidden, positions=caches.positions, cache=caches)[0]
    rows = [part[each.first :] for part, each in zip(hidden.split(caches.sizes), passes)]
    return target.logits(torch.cat(rows)).split([len(each) for each in rows])


class Caches:
    """The KV caches of several Passes as one; each Pass has its own part of a row."""

    length = 0  # what a part follows is its own matter

    def __init__(self, passes, like):
        self.caches = [each.cache for each in passes]
        self.sizes, self.masks, positions = [], [], []
        for each in passes:
            S, T = each.cache.length, len(each.tokens)
            follow = torch.arange(S, S + T, device=like.device)
            positions.append(follow if each.positions is None else each.positions)
            self.masks.append(whole_mask(each.mask, S, T, like))
            self.sizes.append(T)
        self.positions = torch.cat(positions)

    def attend(self, layer, q, k, v, mask):
        parts = zip(self.caches, *(each.split(self.sizes, dim=2) for each in (q, k, v)), self.masks)
        return torch.cat([cache.attend(layer, *part) for cache, *part in parts], dim=2)

    def advance(self, count):
        for cache, size in zip(self.caches, self.sizes):
            cache.advance(size)
