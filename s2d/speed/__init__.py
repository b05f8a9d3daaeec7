"""CPU speed: faster matmuls of a few rows, and compiled passes.

``load_model`` calls ``quicken``, or makes a ``CompiledLlama`` (static.py). Only this folder touches
private parts of PyTorch, because there is no public way to the same speed:

- linear.py: ``torch._C._set_mkldnn_enabled`` switches oneDNN off for one matmul, where the public
  context manager takes longer than a small matmul does; ``torch.ops.mkldnn`` packs weights;
- compiled.py: ``torch._inductor`` (compiler options, its cache directory, the code for a matmul
  with packed weights) and ``torch._dynamo.mark_dynamic``, which has no public name;
- static.py: ``torch._dynamo.config``, for how many kinds of passes a GPU's code is compiled.
"""

import torch
from torch import nn

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
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.t().contiguous().t()
