"""Llama: run any range of layers, from tokens or from hidden states, with a KV cache or without.

A forward pass is ``embed`` -> ``run_layers`` -> ``logits``. It may stop after any layer and
continue later from the hidden states there, as the exits of a sorted draft do (draft.py).
"""

import math
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import KVCache, attend


@dataclass(frozen=True)
class LlamaConfig:
    """The architecture, in the names of Hugging Face's config.json where it has one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    rope_llama3: tuple[float, float, int] | None = None  # low and high factor, original context
    tie_word_embeddings: bool = False
    bos_token_id: int = 1
    eos_token_ids: tuple[int, ...] = (2,)
    # How it drafts unless options say otherwise (generate.py).
    exit_layers: tuple[int, ...] = ()  # the layers after which it may predict
    thresholds: tuple[float, ...] = ()  # one per exit: the confidence that is enough there
    draft_length: int = 6  # of a chain
    draft_stop: float = 0.0  # of a chain, see ``KConfig``
    draft_tree: tuple[int, int, int] = (10, 4, 60)  # top_k, depth, size


class RMSNorm(nn.Module):
    """x / rms(x) * weight; of half precision PyTorch takes the root in float32, as Llama needs."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight


def rope_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding at every position, (positions, D) float32 each.

    Dimension i rotates together with i + D/2. The sines of the first half have the minus sign of
    that rotation, so ``rotate`` is one product and one fused multiply-add (Su et al. 2021, 3.4).
    """
    # On the CPU even where the parameters are built on the meta device: the table is never loaded.
    D = config.head_dim
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D
    frequencies = 1.0 / config.rope_theta**exponents  # radians per position, (D/2,)
    stretched = frequencies / config.rope_factor  # for contexts longer than the original one
    if config.rope_llama3 is not None:
        # Llama 3.1: frequencies that make fewer than ``low`` turns in the original context are
        # stretched, those that make more than ``high`` stay, and between the two they are blended.
        low, high, context = config.rope_llama3
        turns = context / (2 * math.pi / frequencies)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        stretched = (1.0 - kept) * frequencies / config.rope_factor + kept * frequencies
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, stretched)  # (positions, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x (B, H, T, D), with cos and signed sin (T, D)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share G key/value heads."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x, rope, mask, cache, layer):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, G, T, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, G, T, D)
        cos, sin = rope
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = cache.attend(layer, q, k, v, mask) if cache else attend(q, k, v, mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, mask, cache, layer):
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model; ``model(tokens)``, (B, T) -> (B, T, V), is the causal language model."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        # Nested because of the checkpoint's names: model.embed_tokens, model.layers, model.norm.
        self.model = nn.ModuleDict()
        self.model["embed_tokens"] = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model["layers"] = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.model["norm"] = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight
        cos, sin = rope_table(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def new_cache(self, capacity: int, first: int = 0, end: int | None = None) -> KVCache:
        """An empty KV cache of ``capacity`` slots for layers first..end-1."""
        layers = len(self.model["layers"][first:end])
        config = self.config
        shape = (layers, 1, capacity, config.num_key_value_heads, config.head_dim)
        return KVCache(shape, self.device, self.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> hidden states (B, T, hidden) that enter layer 0."""
        return self.model["embed_tokens"](tokens)

    def run_layers(self, hidden, first=0, end=None, positions=None, mask=None, cache=None):
        """Hidden states (B, T, hidden) through layers first..end-1: (B, T, hidden).

        With a ``cache`` of S positions B is 1, and the T new positions are stored behind them.
        ``positions`` (T,) are for the rotary embedding, by default S..S+T-1. ``mask`` (T, S+T) is 0
        where a row attends to a column and -inf elsewhere (``tree.positions_and_mask``). Without
        one, attention is causal; behind a cache, that is possible for T = 1 alone.
        """
        T = hidden.shape[1]
        S = 0 if cache is None else cache.length
        if positions is None:
            positions = slice(S, S + T)
        rope = self.rope_cos[positions], self.rope_sin[positions]  # (T, D) each
        for index, block in enumerate(islice(self.model["layers"], first, end)):
            hidden = block(hidden, rope, mask, cache, index)
        if cache is not None:
            cache.advance(T)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., hidden) after any layer -> logits (..., V)."""
        return self.lm_head(self.model["norm"](hidden))

    def forward(self, tokens: Tensor, last: int = 0, **options) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), or only those of the ``last`` positions; 0: of all.

        ``options``: positions, mask and cache of ``run_layers``.
        """
        hidden = self.run_layers(self.embed(tokens), **options)
        return self.logits(hidden[:, -last:])
