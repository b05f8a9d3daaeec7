"""Is a method lossless here? Where two texts differ: a tie by rounding, or a bug?

A pass over many tokens and one over a single token run different kernels, so below float64 two
nearly equal logits can swap their order. Such a tie is told from a bug by how far the logits are
apart in a more precise model, and how far a pass may be from that.
"""

from itertools import zip_longest
from math import inf

import torch

from ..model import Llama
from ..sampling import Noise
from ..stats import Generation
from .measure import Record

LIKELY = 10  # tokens by whose logits a plain pass is judged


def check(name: str, target: Llama, precise: Llama, records: list[Record]) -> int:
    """Print a line for each method but "ar" that is lossless; return 1 for a bug, or 0.

    Left out is, above T = 0, rejection sampling, which draws another text. ``precise`` is the
    ``target`` in float64.
    """
    alone = [record for record in records if record.method == "ar"]
    code = 0
    for method in dict.fromkeys(record.method for record in records if record.method != "ar"):
        own = [record for record in records if record.method == method]
        first = own[0].turns[0].generation
        if first is None or not first.exact:  # transformers; or roots as published
            continue
        if first.options.rule != "noise" and first.options.temperature > 0:
            continue
        differences = []
        for one, other in zip(alone, own):
            for turn, others in zip(one.turns, other.turns):
                found = first_difference(
                    target, precise, turn.prompt, turn.generation, others.tokens
                )
                if found is not None:
                    differences.append(found)
                    break  # later turns have another context
        line, lossless = verdict(differences)
        print(f"{name} {method}: {len(own)} answers compared: {line}", flush=True)
        if not lossless:
            code = 1
    print()
    return code


@torch.inference_mode()
def first_difference(
    target: Llama,
    precise: Llama,
    prompt: list[int],
    own: Generation,
    other: list[int],
    error: float = 0.0,
) -> tuple[float, float] | None:
    """(gap, error) where the text of ``own`` and the tokens ``other`` first differ, or None.

    The gap is between the two tokens' logits in the ``precise`` model, with the noise above T = 0.
    The error is the largest of the target's plain pass at a likely token, or ``error`` if that is
    larger: the logits of another program's pass are known to be so far off.
    """
    for position, pair in enumerate(zip_longest(own.tokens, other)):
        if None in pair:
            return inf, error  # one answer has ended
        if pair[0] != pair[1]:
            context = prompt + own.tokens[:position]
            tokens = torch.tensor([context], device=target.device)
            exact = precise(tokens)[0, -1].cpu().double()  # (V,)
            plain = target(tokens)[0, -1].cpu()
            likely = exact.topk(LIKELY).indices
            error = max(error, (plain - exact)[likely].abs().max().item())
            # p / e is largest where logits - T log e are.
            noise = Noise(own.options.seed, len(exact), "cpu", exact.dtype).at([len(context)])[0]
            decided = exact - own.options.temperature * noise.log()
            return decided[list(pair)].diff().abs().item(), error
    return None


def verdict(differences: list[tuple[float, float]]) -> tuple[str, bool]:
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
