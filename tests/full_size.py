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
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from s2d.checkpoint import empty_model, save_model  # noqa: E402
from s2d.model import Llama, LlamaConfig  # noqa: E402

SHAPES = {  # hidden size, MLP width, layers, heads, vocabulary
    "7b": (4096, 11008, 32, 32, 32000),  # Vicuna 7B, Llama 2 7B
    "tiny": (256, 688, 16, 4, 1000),
}
# How much a layer adds to the residual stream, by its number: up to 6, up to 9, up to 12, above.
WEIGHT_OF = {6: 1.0, 9: 0.2, 12: 0.12, 10**9: 0.05}
# The published thresholds are 0.5: random weights are hardly ever as confident.
DRAFTING = dict(exits=(6, 9, 12), thresholds=(0.2, 0.2, 0.0), draft_length=5)


def config_of(shape: str) -> LlamaConfig:
    """Of a model whose text never ends by itself."""
    hidden, width, layers, heads, vocab_size = SHAPES[shape]
    sizes = dict(vocab_size=vocab_size, hidden_size=hidden, intermediate_size=width)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=heads)
    sizes |= dict(head_dim=hidden // heads, num_hidden_layers=layers)
    return LlamaConfig(eos_token_ids=(), **sizes)


def make_model(shape: str, device: torch.device | str, dtype: torch.dtype) -> Llama:
    """A target that drafts for itself."""
    model = empty_model(config_of(shape))
    model.drafting = DRAFTING
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = torch.empty(parameter.shape, dtype=dtype, device=device)
        fill(name, weights[name], generator)
    model.load_state_dict(weights, assign=True)
    return model


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Give the parameter ``name`` its random values."""
    std = tensor.shape[-1] ** -0.5  # a layer's output has the size of its input
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        number = int(re.search(r"layers\.(\d+)\.", name)[1]) + 1
        std *= next(weight for last, weight in WEIGHT_OF.items() if number <= last)
    if name == "lm_head.weight":
        std *= 4  # distributions that are far from uniform
    if "embed" in name:
        std = 1.0
    if tensor.dim() == 2:
        tensor.normal_(0.0, std, generator=generator)
    else:
        tensor.fill_(1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    args = parser.parse_args()
    save_model(make_model(args.shape, "cpu", torch.bfloat16), args.folder, ROOT / "weights/mini-7b")
