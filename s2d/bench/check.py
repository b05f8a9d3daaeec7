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
from .tables import Comparison, by_method

LIKELY = 10  # tokens by whose logits a plain pass is judged

Difference = tuple[float, float]  # a gap between two logits, and the error that a pass may have


def find_bugs(comparison: Comparison, target: Llama, precise: Llama) -> bool:
    """Print a line for each method that is lossless; return whether one has a bug.

    Rejection sampling is left out above T = 0, as it draws another text than "ar", and so are
    roots as published. ``precise`` is the ``target`` in float64.
    """
    rows = by_method(comparison.records)
    found = False
    for method, own in rows.items():
        made = own[0].turns[0].generation
        if method == "ar" or made is None:  # transformers
            continue
        draws_anew = made.options.rule != "noise" and made.options.temperature > 0
        if draws_anew or not made.exact:
            continue
        differences = [compare_turns(target, precise, *pair) for pair in zip(rows["ar"], own)]
        line, lossless = explain(differences)
        print(f"{comparison.title} {method}: {len(own)} answers compared: {line}", flush=True)
        found = found or not lossless
    print()
    return found


def compare_turns(target: Llama, precise: Llama, one: Record, other: Record) -> Difference | None:
    """The first difference of two records; turns after it have another context."""
    for turn, others in zip(one.turns, other.turns):
        found = first_difference(target, precise, turn.prompt, turn.generation, others.tokens)
        if found is not None:
            return found
    return None


@torch.inference_mode()
def first_difference(
    target: Llama,
    precise: Llama,
    prompt: list[int],
    own: Generation,
    other: list[int],
    error: float = 0.0,
) -> Difference | None:
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
            noise = Noise(own.options.seed, len(exact), "cpu", exact.dtype)
            drawn = noise.at([len(context)])[0]  # (V,)
            decided = exact - own.options.temperature * drawn.log()
            return decided[list(pair)].diff().abs().item(), error
    return None


def explain(found: list[Difference | None]) -> tuple[str, bool]:
    """(one line, whether the method is lossless) from what ``first_difference`` found.

    A tie is two tokens no farther apart than two passes can move them, each by the plain one's
    error.
    """
    differences = [each for each in found if each is not None]
    bugs = sum(gap > 2 * error for gap, error in differences)
    if bugs:
        return f"BUG: {bugs} of {len(differences)} differ by more than rounding explains", False
    if differences:
        gap = max(differences)[0]
        return f"{len(differences)} ties by rounding, largest gap {gap:.1e}", True
    return "identical", True
