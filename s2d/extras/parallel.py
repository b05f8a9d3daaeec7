"""Several processes as one, as torchrun starts them: a target divided among them.

Knows nothing about how a drafter drafts. Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053,
section 3): attention heads and the MLP's inner width are divided among the ranks, embedding and LM
head by vocabulary. A block needs two sums over the ranks, after ``o_proj`` and after ``down_proj``.
Every rank ends each pass with the same logits. Rank 0 alone drafts and verifies: one bit of
difference at a threshold could leave the others with trees of other sizes.
"""

import io
import os
import time
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from ..proposal import Proposal
from ..tree import TokenTree
from ..verify import Verdict
from ..weights import check_device, load_model
from ..weights.config import read_config

# Which dimension of a weight is divided; everything else, the norms, is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"embed_tokens": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}


@contextmanager
def joined(device):
    """Join the processes that torchrun started; only rank 0 prints.

    Yields a DeviceMesh over them and the name of this rank's device, a GPU of its own for "cuda".
    """
    device = kind = check_device(device).type
    if kind == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(check_device(device))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    with ExitStack() as silence:
        if dist.get_rank() > 0:
            silence.enter_context(redirect_stdout(io.StringIO()))
            silence.enter_context(redirect_stderr(io.StringIO()))
        yield init_device_mesh(kind, (dist.get_world_size(),)), device
    time.sleep(0.1)  # gloo's threads drop the last tensors, and abort if Python ends before that
    dist.destroy_process_group()


def from_rank_0(function):
    """What ``function()`` returns on rank 0, or in the one process; no other rank calls it."""
    if not dist.is_initialized():
        return function()
    box = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


class FirstDecides:
    """A drafter of several processes: rank 0 asks ``drafter`` and tells the others."""

    def __init__(self, drafter, device):
        self.drafter, self.device = drafter, device
        self.shape, self.exact = drafter.shape, drafter.exact
        self.first = dist.get_rank() == 0

    def propose(self, context, budget, sampling):
        own = self.drafter.propose(context, budget, sampling) if self.first else None

        def said():
            lists = own.tree.tokens.tolist(), own.tree.parents.tolist()
            return *lists, own.rounds, own.depth, own.confidences

        tokens, parents, *others = from_rank_0(said)
        if own:
            return own
        new = partial(torch.tensor, dtype=torch.long, device=self.device)
        return Proposal(TokenTree(new(tokens), new(parents)), None, None, *others)

    def verify(self, proposal, logits, sampling):
        own = self.drafter.verify(proposal, logits, sampling) if self.first else None
        path, tokens = from_rank_0(lambda: (own.path, own.tokens))
        return own or Verdict(path, tokens, [], None)

    def keep(self, n, proposal, verdict, logits):
        if self.first:
            self.drafter.keep(n, proposal, verdict, logits)


def load_target(path, device, dtype, mesh):
    """As ``load_model``, but each rank of ``mesh`` reads and keeps only its part of the weights.

    Raises ValueError where heads cannot be divided evenly.
    """
    config, rank, ranks = read_config(path), mesh.get_local_rank(), mesh.size()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads % ranks or heads % ranks:
        raise ValueError(
            f"{path}: {heads} heads with {kv_heads} key/value heads "
            f"cannot be divided among {ranks} processes"
        )

    def part(name, shape):
        """Which slices of a weight this rank keeps."""
        slices = [slice(None)] * len(shape)
        if (dim := DIVIDED.get(name.split(".")[-2])) is not None:
            size = -(-shape[dim] // ranks)  # the last rank may have less
            slices[dim] = slice(min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim]))
        return tuple(slices)

    model = load_model(path, device, dtype, share=part)
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
