"""A target that is divided among several processes: tensor parallelism.

Attention heads and the MLP's inner width are divided among the ranks (Shoeybi et al. 2019, arXiv
1909.08053, section 3). A block needs two sums over the ranks, after ``o_proj`` and after
``down_proj``. Embedding and LM head, a hundredth of a large model, are whole on every rank.

Every rank runs the same program, and so the same Decoder on its part of the target. But rank 0
alone drafts and verifies, and the others are told its tree and what of it was accepted: one bit of
difference at a threshold, and another rank would have another tree.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint import load_model
from ..checkpoint.config import read_config
from ..decoder import Decoder
from ..generation import make_decoder
from ..model import Llama
from ..options import Settings
from ..roots import RootsDecoder
from ..rules import Prediction
from ..tree import Tree
from .ranks import from_rank_0, is_rank_0, new_sums_group, own_device

# Which dimension of a weight is divided; everything else is whole on every rank.
DIVIDED = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIVIDED |= {"o_proj": 1, "down_proj": 1}
# What a rank that did not draft a tree needs of it. The distributions of rejection sampling are
# large, and stay on rank 0; every rank has the context and the shape.
SENT = "tokens parents depths probs exit_layers level_count".split()


def load_part(path: Path, device: str, dtype: str) -> Llama:
    """As ``load_model``, but this rank reads and keeps only its part of the blocks' weights.

    Raises ValueError also if the ranks cannot share the key/value heads evenly.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    kv_heads = read_config(path).num_key_value_heads
    if kv_heads % ranks:
        raise ValueError(f"{path}: {kv_heads} key/value heads cannot be divided among {ranks}")

    def share(name: str, shape: tuple[int, ...]) -> Any:
        dim = DIVIDED.get(name.split(".")[-2])
        if dim is None:
            return ...
        size = -(-shape[dim] // ranks)  # the last rank may have less
        own = slice(rank * size, (rank + 1) * size)
        return own if dim == 0 else (slice(None), own)

    model = load_model(path, own_device(device), dtype, share=share)
    model.config = replace(model.config, num_key_value_heads=kv_heads // ranks)  # of its KV caches
    group = new_sums_group(model.device)
    for block in model.model.layers:
        for last in (block.self_attn.o_proj, block.mlp.down_proj):
            last.register_forward_hook(partial(sum_over_ranks, group))
    return model


def sum_over_ranks(
    group: dist.ProcessGroup, module: nn.Module, inputs: Any, output: Tensor
) -> None:
    """After a matmul with a part of a weight's columns: each rank has one summand."""
    dist.all_reduce(output, group=group)


def make_shared_decoder(
    target: Llama, tokens: Sequence[int], draft: Llama | None, settings: Settings
) -> Decoder:
    """As ``make_decoder``, for this rank's part of a target. Only rank 0 needs the ``draft``."""
    if settings.method != "ar" and not is_rank_0():
        settings = replace(settings, exits=(ExitOfRank0(),), thresholds=(0.0,))
    return make_decoder(
        target, tokens, draft, settings, decoder=SharedDecoder, roots_decoder=SharedRootsDecoder
    )


class SharedDecoder(Decoder):
    """A Decoder on every rank, which drafts and verifies on rank 0."""

    def make_tree(self) -> Tree:
        if is_rank_0():
            tree = super().make_tree()
        else:
            tree = Tree(self.context, self.settings.shape, max_levels=0)
        sent = from_rank_0(lambda: {name: getattr(tree, name) for name in SENT})
        for name, value in sent.items():
            setattr(tree, name, value)
        return tree

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        verify = super().verify
        return from_rank_0(lambda: verify(tree, logits))


class SharedRootsDecoder(SharedDecoder, RootsDecoder):
    """The same, whose roots come from the target (roots.py); those of rank 0 are in its tree."""


class ExitOfRank0:
    """The exit of ranks that do not draft, which nobody asks."""

    exit_layer = 0
    max_positions = math.inf

    def predict(self, tree: Tree) -> Prediction:
        raise NotImplementedError("rank 0 drafts")

    def keep(self, n: int, slots: list[int]) -> None:
        """It keeps nothing."""
