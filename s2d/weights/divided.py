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


def load_target(path, device, dtype, mesh, config=None):
    """As ``load_model``, but each rank of ``mesh`` reads and keeps only its part of the weights."""
    config = config or read_config(path)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads % ranks or heads % ranks:
        both = f"{heads} heads with {kv_heads} key/value heads"
        raise ValueError(f"{path}: {both} cannot be divided among {ranks} processes")

    def part(name, shape):
        slices = [slice(None)] * len(shape)
        if (dim := DIVIDED.get(name.split(".")[-2])) is not None:
            size = -(-shape[dim] // ranks)  # the last rank may have less
            slices[dim] = slice(min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim]))
        return tuple(slices)

    model = load_model(path, device, dtype, share=part, config=config)
    for block in model.model["layers"]:
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.register_forward_hook(sum_over_ranks)
    embedding = model.model["embed_tokens"]
    whole = dict(shape=torch.Size((config.vocab_size, config.hidden_size)))
    whole["stride"] = config.hidden_size, 1
    weight = DTensor.from_local(embedding.weight, mesh, [Shard(0)], **whole)
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    model.lm_head.register_forward_hook(partial(joined_logits, mesh, config.vocab_size))
    # Of this rank: its KV caches hold no other heads.
    own = dict(num_attention_heads=heads // ranks, num_key_value_heads=kv_heads // ranks)
    model.config = replace(model.config, **own)
    model.mesh = mesh
    return model


def sum_over_ranks(module, inputs, output):
    """After a product with a part of a weight's columns: each rank has one summand."""
    dist.all_reduce(output)


def joined_logits(mesh, vocab_size, module, inputs, output):
    """After the LM head: each rank has the logits (..., part of V); returns (..., V)."""
    shape = torch.Size((*output.shape[:-1], vocab_size))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(output, mesh, [Shard(-1)], shape=shape, stride=stride).full_tensor()
