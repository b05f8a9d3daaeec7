"""A target that is divided among the processes that torchrun started: tensor parallelism.

Attention heads and the MLP's inner width are divided among the ranks (Shoeybi et al. 2019, arXiv
1909.08053, section 3), as gpt-fast does it. A block needs two sums over the ranks, after ``o_proj``
and after ``down_proj``. All else is whole on every rank.

All ranks run the same program on the same arguments: all draft, and all verify. The sums are the
same on all ranks, so their trees are the same too, if the processors are of one kind.
"""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.config import ModelFolder
from ..checkpoint.load import load_model
from ..model import Llama
from .processes import own_device

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}


def load_part(folder: ModelFolder, device: str, dtype: str) -> Llama:
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights.

    Raises ValueError if the parts would not be of one size.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    config = folder.config
    kv_heads = config.num_key_value_heads  # each with its queries
    for size, what in ((kv_heads, "key/value heads"), (config.intermediate_size, "MLP units")):
        if size % ranks:
            words = f"{size} {what} cannot be divided among {ranks} processes"
            raise ValueError(f"{folder.path}: {words}")

    def share(name: str, tensor: Tensor) -> Tensor:
        kind = name.split(".")[-2]
        return tensor.chunk(ranks, DIVIDED[kind])[rank] if kind in DIVIDED else tensor

    part = replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        num_key_value_heads=kv_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )
    model = load_model(folder._replace(config=part), own_device(device), dtype, share=share)
    for block in model.model.layers:
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.register_forward_hook(sum_over_ranks)
    return model


def sum_over_ranks(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """After a matmul with some columns of a weight: every rank has one summand of ``output``."""
    dist.all_reduce(output)
