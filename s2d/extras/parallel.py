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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..proposal import Proposal
from ..tree import TokenTree
from ..verify import Verdict
from ..weights import check_device, empty_model, load_model, parameter_shapes
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
    for name, shape in parameter_shapes(empty_model(config)).items():
        module, _, leaf = name.rpartition(".")
        if (dim := DIVIDED.get(module.split(".")[-1])) is not None:
            owner = model.get_submodule(module)
            whole = dict(shape=torch.Size(shape), stride=(shape[1], 1))
            weight = DTensor.from_local(getattr(owner, leaf), mesh, [Shard(dim)], **whole)
            setattr(owner, leaf, nn.Parameter(weight, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model["embed_tokens"].weight
    # Of this rank: its KV caches hold no other heads.
    own = dict(num_attention_heads=heads // ranks, num_key_value_heads=kv_heads // ranks)
    model.config = replace(model.config, **own)
    model.mesh = mesh
    return parallelize_module(model, mesh, tensor_plan())


def tensor_plan():
    """Which weights are divided how. The embedding takes whole tensors, the LM head gives them."""
    ways = ColwiseParallel, RowwiseParallel  # of weights divided in dimension 0, in dimension 1
    layers = [name for name in DIVIDED if name.endswith("_proj")]
    plan = {f"model.layers.*.*.{name}": ways[DIVIDED[name]]() for name in layers}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan
