"""A folder -> a Llama divided among several processes.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, section 3): attention heads and the MLP's
inner width are divided among the ranks, embedding and LM head by vocabulary. A block needs two sums
over the ranks, after ``o_proj`` and after ``down_proj``.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from . import load_model
from .config import read_config

# Which dimension of a weight is divided; everything else, the norms, is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"embed_tokens": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}


def load_target(path, device, dtype, mesh):
    """As ``load_model``, but each rank of ``mesh`` reads and keeps only its part of the weights."""
    rank, ranks, config = mesh.get_local_rank(), mesh.size(), read_config(path)
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
    embedding, shape = model.model["embed_tokens"], (config.vocab_size, config.hidden_size)
    weight = from_parts(embedding.weight, mesh, 0, shape)
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    model.lm_head.register_forward_hook(partial(joined_logits, mesh, config.vocab_size))
    # Of this rank: its KV caches hold no other heads.
    own = {"num_attention_heads": heads // ranks, "num_key_value_heads": kv_heads // ranks}
    model.config = replace(config, **own)
    model.mesh = mesh
    return model


def sum_over_ranks(module, inputs, output):
    """After a product with a part of a weight's columns: each rank has one summand."""
    dist.all_reduce(output)


def joined_logits(mesh, vocab_size, module, inputs, output):
    """After the LM head: each rank has the logits (..., part of V); returns (..., V)."""
    return from_parts(output, mesh, -1, (*output.shape[:-1], vocab_size)).full_tensor()


def from_parts(part, mesh, dim, shape):
    """The DTensor of ``shape`` of which this rank has ``part``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(dim)], shape=torch.Size(shape), stride=stride)
