"""CPU speed: faster matmuls of a few rows, and compiled passes.

``load_model`` calls ``quicken``, or makes a model of ``class_for`` (static.py). Only this folder
touches private parts of PyTorch, because there is no public way to the same speed:

- linear.py: ``torch._C._set_mkldnn_enabled`` switches oneDNN off for one matmul, where the public
  context manager takes longer than a small matmul does; ``torch.ops.mkldnn`` packs weights.
"""

import torch
from torch import nn

from ..model import Llama

DTYPES = torch.float32, torch.bfloat16  # for which there is a choice of kernels
CACHED = 40e6  # bytes of a model that fits the caches of a processor


def is_large(model: nn.Module) -> bool:
    return sum(weight.nbytes for weight in model.parameters()) > CACHED


def quicken(model: nn.Module) -> None:
    """Make the matmuls of ``model``, on a CPU, faster for a few rows; names and values stay.

    Until it is used, it can also be trained.
    """
    if model.dtype in DTYPES and is_large(model):
        from .linear import use_fastest

        use_fastest(model)
    elif model.dtype.itemsize >= 4:  # PyTorch's kernel for one row is a third faster by columns
        lay_by_columns(model)


def lay_by_columns(model: nn.Module) -> None:
    """Store the weights of linear layers by columns; ``model`` stays an ordinary model."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def class_for(device: torch.device) -> type[Llama]:
    """The class of a Llama with compiled passes on a CPU, or CUDA graphs on a GPU.

    Raises ValueError for another device.
    """
    if device.type == "cuda":
        from .graphs import GraphedLlama

        return GraphedLlama
    if device.type == "cpu":
        from .compiled import CompiledLlama

        return CompiledLlama
    raise ValueError(f"--compile is for a CPU or a CUDA GPU, not for {device}")
