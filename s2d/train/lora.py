"""Low-rank adapters: a model's weights stay, and a small change of each linear layer is learnt.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1). How the result is stored and added up again:
weights/adapter.py. Knows nothing about losses and text.
"""

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 8.0  # of the change, alpha / r: a step of AdamW then moves it this much farther


class Adapted(nn.Module):
    """A linear layer x W^T whose ``weight`` W (out, in) stays, and a learnt change, SCALE B A."""

    def __init__(self, weight, rank, generator):
        super().__init__()
        out, inner = weight.shape
        random = torch.randn(rank, inner, generator=generator) * inner**-0.5
        self.weight = weight
        self.A = nn.Parameter(random.to(weight))
        self.B = nn.Parameter(weight.new_zeros(out, rank))

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.A), self.B) * SCALE


def add_adapters(model, rank, seed):
    """Put adapters on every linear layer of ``model``'s blocks, in place; only these learn then."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for block in model.model["layers"]:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                setattr(part, name, Adapted(layer.weight, rank, generator))


def adapter_pairs(model):
    """{weight's name: (A, B)} of all adapters of a model."""
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, Adapted)}
    return {f"{name}.weight": (m.A.detach(), m.B.detach()) for name, m in adapted.items()}
