"""A folder -> this process's part of a Llama that is divided among several.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, section 3): attention heads and the MLP's
inner width are divided among the ranks. A block needs two sums over the ranks, after ``o_proj`` and
after ``down_proj``. Embedding and LM head, a hundredth of a large model, are whole on every rank.
"""

from dataclasses import replace

import torch.distributed as dist

from . import load_model
from .config import read_config

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}


def load_part(path, device, dtype):
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights."""
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), read_config(path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads % ranks:
        raise ValueError(f"{path}: {kv_heads} key/value heads cannot be divided among {ranks}")

    def share(name, shape):
        dim = DIVIDED.get(name.split(".")[-2])
        if dim is None:
            return ...
        size = -(-shape[dim] // ranks)  # the last rank may have less
        own = slice(rank * size, (rank + 1) * size)
        return own if dim == 0 else (slice(None), own)

    model = load_model(path, device, dtype, share=share)
    for block in model.model["layers"]:
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.register_forward_hook(sum_over_ranks)
    # Of this rank: its KV caches hold no other heads.
    own = {"num_attention_heads": heads // ranks, "num_key_value_heads": kv_heads // ranks}
    model.config = replace(config, **own)
    return model


def sum_over_ranks(module, inputs, output):
    """After a matmul with a part of a weight's columns: each rank has one summand."""
    dist.all_reduce(output)
