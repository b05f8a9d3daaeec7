"""Passes of a few rows, made faster on a CPU and on a GPU; several processes."""

import torch

from ..model import Llama


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
