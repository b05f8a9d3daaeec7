"""Several processes as one, as torchrun starts them: rank 0 decides, and the others follow.

Knows nothing about how a drafter drafts. How a target is divided among them: weights/divided.py.
Every rank ends each pass with the same logits. Rank 0 alone drafts and verifies: one bit of
difference at a threshold could leave the others with trees of other sizes.
"""

import io
import time
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..proposal import Proposal
from ..tree import TokenTree
from ..verify import Verdict


@contextmanager
def joined(device):
    """A DeviceMesh of the processes that torchrun started; only rank 0 of them prints."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with ExitStack() as silence:
        if dist.get_rank() > 0:
            silence.enter_context(redirect_stdout(io.StringIO()))
            silence.enter_context(redirect_stderr(io.StringIO()))
        yield init_device_mesh(device.type, (dist.get_world_size(),))
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

    def verify(self, n, proposal, logits, sampling):
        own = self.drafter.verify(n, proposal, logits, sampling) if self.first else None
        path, tokens = from_rank_0(lambda: (own.path, own.tokens))
        return own or Verdict(path, tokens, [], None)

    def keep(self, n, proposal, verdict, logits):
        if self.first:
            self.drafter.keep(n, proposal, verdict, logits)
