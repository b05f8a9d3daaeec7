"""Is it lossless here? Every greedy answer against the target alone, and what lies behind each difference.

A pass over many tokens and a pass over one run different kernels, so in less than double precision two nearly equal
logits can change places. Such a tie is told from a bug by computing both in float64. Knows nothing about timing.
"""

import torch


@torch.inference_mode()
def first_difference(target, precise, prompt, alone, other):
    """None where ``other`` is the target's own answer ``alone``, else (position, gap, noise) of the first difference.

    ``gap`` is how far apart the two tokens' logits are in ``precise``, the target in float64; ``noise`` by how much the
    target's own logits there differ from those.
    """
    position = next((i for i, (a, b) in enumerate(zip(alone, other)) if a != b), None)
    if position is None:
        return None if len(alone) == len(other) else (min(len(alone), len(other)), float("inf"), 0.0)
    tokens = torch.tensor([prompt + alone[:position]], device=target.device)
    logits = precise(tokens)[0, -1]
    gap = (logits[alone[position]] - logits[other[position]]).abs().item()
    return position, gap, (target(tokens)[0, -1].double() - logits).abs().max().item()


def verdict(differences):
    """One line on all (position, gap, noise), and whether it is good: a gap is a tie while rounding can explain it.

    Two passes, each wrong by up to the noise in both logits, can swap tokens that are up to four times as far apart.
    """
    if not differences:
        return "identical", True
    count, widest = len(differences), max(gap for _, gap, _ in differences)
    if all(gap <= 4 * noise for _, gap, noise in differences):
        return f"{count} tie{'s'[: count > 1]} by rounding, largest gap {widest:.1e}", True
    return f"BUG: {count} difference{'s'[: count > 1]}, largest gap {widest:.1e}, more than rounding explains", False
