"""Is a method lossless here? Where its answers differ from the target's own: rounding, or a bug?

A pass over many tokens and one over a single token run different kernels, so below float64 two
nearly equal logits can swap their order. Such a tie is told from a bug by the same model in
float64: how far apart the two are there, and how far the target's plain pass is from it.
"""

from itertools import zip_longest
from math import inf

import torch

from ..notices import progress
from ..sampling import Noise

LIKELY = 10  # tokens by whose logits a plain pass is judged


@torch.inference_mode()
def check(name, target, precise, methods, records):
    """Print a line for each of ``methods`` but "ar"; return 1 for a bug, or 0.

    Left out are methods that are not lossless, and above T = 0 rejection sampling, which draws
    another text. ``precise`` is the ``target`` in float64.
    """
    alone, code = [record for record in records if record["method"] == "ar"], 0
    for method in list(methods)[1:]:
        own = [record for record in records if record["method"] == method]
        first = own[0]["generations"][0]
        if first.exact and (first.settings.rule == "noise" or first.settings.temperature == 0):
            pairs = progress(zip(alone, own), f"comparing {name} {method}: answers", len(own))
            found = [first_difference(target, precise, *pair) for pair in pairs]
            line, lossless = verdict([difference for difference in found if difference])
            print(f"{name} {method}: {len(own)} answers compared: {line}", flush=True)
            if not lossless:
                code = 1
    print()
    return code


def first_difference(target, precise, alone, other):
    """(gap, error) where two records first differ, or None; later turns have another context.

    The gap is between the two tokens' logits, in float64 and with the noise above T = 0; the error
    is the largest of the target's plain pass at a likely token.
    """
    turns = zip(alone["prompts"], alone["tokens"], other["tokens"], alone["generations"])
    for prompt, own, theirs, generation in turns:
        for position, pair in enumerate(zip_longest(own, theirs)):
            if None in pair:
                return inf, 0.0  # one answer has ended
            if pair[0] != pair[1]:
                context, settings = prompt + own[:position], generation.settings
                tokens = torch.tensor([context], device=target.device)
                exact, plain = precise(tokens)[0, -1].cpu(), target(tokens)[0, -1].cpu()  # (V,)
                likely = exact.topk(LIKELY).indices
                error = (plain - exact)[likely].abs().max().item()
                # p / e is largest where logits - T log e are.
                seen = Noise(settings.seed, len(exact), "cpu", exact.dtype)
                noise = seen.at([len(context)])[0]
                decided = exact - settings.temperature * noise.log()
                return decided[list(pair)].diff().abs().item(), error
    return None


def verdict(differences):
    """(one line, whether the method is lossless) from pairs as of ``first_difference``.

    A tie is two tokens no farther apart than two passes can move them, each by the plain one's
    error.
    """
    bugs = sum(gap > 2 * error for gap, error in differences)
    if bugs:
        return f"BUG: {bugs} of {len(differences)} differ by more than rounding explains", False
    if differences:
        gap = max(differences)[0]
        return f"{len(differences)} ties by rounding, largest gap {gap:.1e}", True
    return "identical", True
