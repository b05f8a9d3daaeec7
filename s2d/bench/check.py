"""Is a method lossless here? Where two texts differ: a tie by rounding, or a bug?

A pass over many tokens and one over a single token run different kernels, so below float64 two
nearly equal logits can swap their order. Such a tie is told from a bug by how far the logits are
apart in a more precise model, and how far a pass may be from that.
"""

from math import inf

import torch

from ..model import Llama
from ..sampling import Noise
from .measure import Turn
from .tables import Comparison, by_method

LIKELY = 10  # tokens by whose logits a plain pass is judged


def find_bugs(comparison: Comparison, target: Llama, precise: Llama) -> bool:
    """Print a line for each method that is lossless; return whether one has a bug.

    Rejection sampling is left out above T = 0, as it draws another text than "ar", and so are
    roots as published. ``precise`` is the ``target`` in float64.
    """
    rows = by_method(comparison.records)
    found = False
    for method, plan in comparison.plans.items():
        draws_anew = plan.asked.rule != "noise" and plan.asked.temperature > 0
        if method == "ar" or draws_anew or not rows[method][0].turns[0].generation.exact:
            continue
        differences = []
        for alone, own in zip(rows["ar"], rows[method]):
            for turn, other in zip(alone.turns, own.turns):
                if turn.tokens != other.tokens:
                    differences.append(first_difference(target, precise, turn, other.tokens))
                    break  # turns after it have another context
        bugs = sum(gap > allowed for gap, allowed in differences)
        line = "identical"
        if bugs:
            line = f"BUG: {bugs} of {len(differences)} differ by more than rounding explains"
            found = True
        elif differences:
            gap = max(differences)[0]
            line = f"{len(differences)} ties by rounding, largest gap {gap:.1e}"
        print(f"{comparison.title} {method}: {len(rows[method])} answers compared: {line}")
    print(flush=True)
    return found


@torch.inference_mode()
def first_difference(
    target: Llama, precise: Llama, alone: Turn, other: list[int]
) -> tuple[float, float]:
    """Where the text of the target ``alone`` and the tokens ``other`` first differ: (gap, allowed).

    The gap is between the two tokens' logits in the ``precise`` model, with the noise above T = 0.
    Two passes can move the tokens towards each other by twice the error of a pass. The error is the
    largest of the target's plain pass at a likely token.
    """
    pairs = list(zip(alone.tokens, other))
    position = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
    if position is None:
        return inf, 0.0  # one of the two has ended
    context = alone.prompt + alone.tokens[:position]
    tokens = torch.tensor([context], device=target.device)
    exact = precise(tokens)[0, -1].cpu().double()  # (V,)
    plain = target(tokens)[0, -1].cpu()
    likely = exact.topk(LIKELY).indices
    error = (plain - exact)[likely].abs().max().item()
    # p / e is largest where logits - T log e are.
    asked = alone.generation.plan.asked
    noise = Noise(asked.seed, len(exact), "cpu", exact.dtype)
    drawn = noise.at([len(context)])[0]  # (V,)
    decided = exact - asked.temperature * drawn.log()
    gap = decided[list(pairs[position])].diff().abs().item()
    return gap, 2 * error
