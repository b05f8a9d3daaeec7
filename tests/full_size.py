"""Random weights in a published shape: not a test, and not run by CI.

    python tests/full_size.py DIR [--shape 7b]              # 13.5 GB for 7b
    python run.py --target DIR --draft DIR --compare        # what a step takes

The target's layers after the 6th change little, and those after the 9th and 12th even less, so that
a draft of its first 12 layers is often right. The text means nothing; times and memory are those of
a trained model of this shape, but tokens per step are what the random weights were made for.
"""

import argparse
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from s2d.checkpoint.load import empty_model  # noqa: E402
from s2d.checkpoint.save import save_model  # noqa: E402
from s2d.model import Llama, LlamaConfig  # noqa: E402

SHAPES = {  # vocabulary, hidden size, MLP width, layers, heads, KV heads, head size
    "7b": (32000, 4096, 11008, 32, 32, 32, 128),  # Vicuna 7B, Llama 2 7B
    "13b": (32000, 5120, 13824, 40, 40, 40, 128),
    "70b": (32000, 8192, 28672, 80, 64, 8, 128),
    "8b": (128256, 4096, 14336, 32, 32, 8, 128),  # Llama 3 8B: grouped heads
    "tiny-7b": (1000, 64, 172, 16, 4, 4, 16),
    "tiny-8b": (1000, 64, 172, 16, 4, 2, 16),
}
# How much a layer adds to the residual stream, by its number: up to 6, up to 9, up to 12, above.
WEIGHT_OF = {6: 1.0, 9: 0.2, 12: 0.12, 10**9: 0.05}
# The published thresholds are 0.5: random weights are hardly ever as confident.
DRAFTING = dict(exits=(6, 9, 12), thresholds=(0.2, 0.2, 0.0), draft_length=5)


def make_model(shape: str, device: torch.device | str, dtype: torch.dtype) -> Llama:
    """A target that drafts for itself, and whose text never ends by itself."""
    model = empty_model(LlamaConfig(*SHAPES[shape], eos_token_ids=()))
    model.drafting = DRAFTING
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        weight = weights[name] = torch.ones(parameter.shape, dtype=dtype, device=device)
        if weight.dim() == 2:
            weight.normal_(0.0, std_of(name, weight.shape[1]), generator=generator)
    model.load_state_dict(weights, assign=True)
    return model


def std_of(name: str, width: int) -> float:
    """The standard deviation of a matrix's values."""
    std = width**-0.5  # a layer's output has the size of its input
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        number = int(re.search(r"layers\.(\d+)\.", name)[1]) + 1
        return std * next(weight for last, weight in WEIGHT_OF.items() if number <= last)
    if name == "lm_head.weight":
        return 4 * std  # distributions that are far from uniform
    return 1.0 if "embed" in name else std


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    args = parser.parse_args()
    save_model(make_model(args.shape, "cpu", torch.bfloat16), args.folder, ROOT / "weights/mini-7b")
