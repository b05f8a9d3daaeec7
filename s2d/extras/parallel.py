"""Several processes as one, as torchrun starts them: a target divided among them.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, section 3): attention heads and the MLP's
inner width are divided among the ranks, so a block needs two sums over them, after ``o_proj`` and
after ``down_proj``; embedding and LM head are divided by vocabulary. So every rank ends each forward
pass with the same logits. Rank 0 alone drafts and verifies: were the others to do the same, one bit
of difference at a threshold could leave them with trees of other sizes.
"""

import io
import os
import time
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace

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
    """Join the processes that torchrun started, each with a GPU of its own if ``device`` is cuda; only rank 0 prints.

    Yields a DeviceMesh over them and the name of this rank's device.
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
    time.sleep(
        0.1
    )  # gloo's threads drop the last tensors; they would abort if the interpreter were gone by then
    dist.destroy_process_group()


def from_rank_0(function):
    """What ``function()`` returns on rank 0, which alone calls it; a process on its own just calls it."""
    if not dist.is_initialized():
        return function()
    box = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


class FirstDecides:
    """A drafter of several processes: rank 0 asks ``drafter``, and tells the others.

    On those, proposals have neither q nor slots.
    """

    def __init__(self, drafter, device):
        self.drafter, self.device = drafter, device
        self.shape, self.exact = drafter.shape, drafter.exact

    def propose(self, context, budget, sampling):
        own = []

        def propose():
            own.append(self.drafter.propose(context, budget, sampling))
            tree = own[0].tree
            numbers = tree.tokens.tolist(), tree.parents.tolist()
            return numbers, own[0].exits, own[0].level_sizes, own[0].confidences

        numbers, exits, level_sizes, confidences = from_rank_0(propose)
        if own:
            return own[0]
        tree = TokenTree(
            *(torch.tensor(row, dtype=torch.long, device=self.device) for row in numbers)
        )
        return Proposal(tree, None, None, exits, level_sizes, confidences)

    def verify(self, proposal, logits, sampling):
        own = []

        def verify():
            own.append(self.drafter.verify(proposal, logits, sampling))
            return own[0].path, own[0].tokens

        path, tokens = from_rank_0(verify)
        return own[0] if own else Verdict(path, tokens, [], None)

    def keep(self, n, proposal, verdict, logits):
        if dist.get_rank() == 0:
            self.drafter.keep(n, proposal, verdict, logits)


def load_target(path, device, dtype, mesh):
    """As ``load_model``, but each rank of ``mesh`` reads and keeps only its part of divided weights.

    Raises ValueError where heads cannot be divided evenly.
    """
    config, rank, ranks = read_config(path), mesh.get_local_rank(), mesh.size()
    if config.num_key_value_heads % ranks or config.num_attention_heads % ranks:
        raise ValueError(
            f"{path}: {config.num_attention_heads} heads with {config.num_key_value_heads} "
            f"key/value heads cannot be divided among {ranks} processes"
        )

    def share(name, shape):
        slices = [slice(None)] * len(shape)
        if (dim := DIVIDED.get(name.split(".")[-2])) is not None:
            size = -(-shape[dim] // ranks)  # the last rank may have less
            slices[dim] = slice(min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim]))
        return tuple(slices)

    model = load_model(path, device, dtype, share=share)
    for name, shape in parameter_shapes(empty_model(config)).items():
        *parents, module, leaf = name.split(".")
        if module in DIVIDED:
            owner = model.get_submodule(".".join([*parents, module]))
            part = DTensor.from_local(
                getattr(owner, leaf),
                mesh,
                [Shard(DIVIDED[module])],
                shape=torch.Size(shape),
                stride=(shape[1], 1),
            )
            setattr(owner, leaf, nn.Parameter(part, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model["embed_tokens"].weight
    model.config = replace(  # this rank's: its KV caches hold no others
        model.config,
        num_attention_heads=config.num_attention_heads // ranks,
        num_key_value_heads=config.num_key_value_heads // ranks,
    )
    model.mesh = mesh
    return parallelize_module(model, mesh, tensor_plan())


def tensor_plan():
    """Where weights are divided, and that the embedding takes, and the LM head gives, whole tensors."""
    plan = {}
    for kind in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
        plan[f"model.layers.*.{kind}_proj"] = ColwiseParallel()
    for kind in ("self_attn.o", "mlp.down"):
        plan[f"model.layers.*.{kind}_proj"] = RowwiseParallel()
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan
