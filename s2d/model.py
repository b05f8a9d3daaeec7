"""Llama: run any range of layers, from tokens or from hidden states, with a KV cache or without.

Qwen2.5 and Qwen3 are the same model with one addition each, which the configuration switches on.

A forward pass is ``embed`` -> ``run_layers`` -> ``logits``. It may stop after any layer and
continue later from the hidden states there, as the exits of a sorted draft do (draft.py).
"""

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm  # in half precision it computes in float32, as Llama needs

from .devices import to_device

Rope = tuple[Tensor, Tensor]  # cos and sin (T, 1, D) of the rotary embedding


@dataclass(frozen=True)
class LlamaConfig:
    """The architecture, mostly by the names in Hugging Face's config.json."""

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
    qkv_bias: bool = False  # queries, keys and values have biases, as in Qwen2.5
    qk_norm: bool = False  # queries and keys are normalised by head, as in Qwen3
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """The rotary embedding's radians per position (D,), in float32 on the CPU.

    From Su et al. 2021, arXiv 2104.09864, section 3.4; but as in Hugging Face's checkpoints,
    dimension i rotates together with i + D/2. The first half is negative: see ``rotate``.
    """
    D = config.head_dim
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D
    frequencies = 1.0 / config.rope_theta**exponents  # (D/2,)
    scaled = frequencies / config.rope_factor  # for contexts longer than the original one
    if config.rope_llama3 is not None:
        # Llama 3.1: frequencies that make fewer than ``low`` turns in the original context are
        # lowered, those that make more than ``high`` stay, and between the two they are blended.
        low, high, context = config.rope_llama3
        turns = context / (2 * math.pi / frequencies)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        scaled = (1.0 - kept) * frequencies / config.rope_factor + kept * frequencies
    return torch.cat((-scaled, scaled))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x (B, T, H, D), with ``cos`` and ``sin`` (T, 1, D).

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). ``sin`` is negative in its first half, so
    that both need the same three operations.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # the halves (b, a)
    return torch.addcmul(x * cos, swapped, sin)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries (B, H, T, D) to keys and values (B, G, S+T, D): (B, T, H·D).

    H/G query heads share a key head. Without a mask a single query attends to everything, and
    several queries attend causally; then S is 0. No fused kernel takes both groups and a ``mask``,
    which is (H/G·T, S+T): the query heads become rows of their key head, also for a single query.
    """
    B, H, T, D = q.shape
    G = k.shape[1]
    if mask is None and T > 1:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G < H)
        return attended.transpose(1, 2).flatten(2)
    rows = q.reshape(B, G, H // G * T, D)
    attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return attended.view(B, G, H // G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H * D)


class KVCache:
    """Keys and values of L layers, (2, L, 1, G, capacity, D). The first ``length`` are filled.

    An entry is forgotten by lowering ``length``. The memory grows when it must.
    """

    def __init__(self, memory: Tensor) -> None:
        self.length = 0
        self.memory = memory

    def extend(self, T: int) -> None:
        """Make room for ``T`` new entries, which each layer is about to fill."""
        start = self.length
        self.length = start + T
        self.memory = with_room(self.memory, self.length, start)
        # The parts of each layer: making them all in one call is faster than in one call for each.
        keys, values = self.memory  # (L, 1, G, capacity, D) each
        self.new_keys = keys.narrow(3, start, T).unbind()
        self.new_values = values.narrow(3, start, T).unbind()
        self.all_keys = keys.narrow(3, 0, self.length).unbind()
        self.all_values = values.narrow(3, 0, self.length).unbind()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Write the new keys and values (1, G, T, D) of a layer; attend to all from q."""
        self.new_keys[layer].copy_(k)
        self.new_values[layer].copy_(v)
        return attention(q, self.all_keys[layer], self.all_values[layer], mask)

    def keep(self, n: int, entries: list[int]) -> None:
        """Keep the first ``n`` entries and, of the later ones, ``entries``.

        The later ones move up to n, n + 1 and so on: ``keep(5, [6, 8])`` leaves seven entries. A
        cache with fewer than ``n`` entries stays as it is: it is given no ``entries``.
        """
        self.length = min(self.length, n + len(entries))
        move_up(self.memory, n, entries)


def with_room(rows: Tensor, needed: int, filled: int) -> Tensor:
    """``rows`` (..., capacity, D), or a larger copy of the ``filled`` ones if that is too few.

    A quarter more is reserved, so that a growing text is copied a few times and not at each step.
    """
    if needed <= rows.shape[-2]:
        return rows
    size = needed + needed // 4 + 64
    larger = rows.new_empty((*rows.shape[:-2], size, rows.shape[-1]))
    larger[..., :filled, :] = rows[..., :filled, :]
    return larger


def move_up(rows: Tensor, n: int, entries: list[int]) -> None:
    """In ``rows`` (..., capacity, D), move the rising ``entries`` to n, n + 1 and so on."""
    end = n + len(entries)
    if entries != list(range(n, end)):  # an accepted part of a chain is in its place already
        rows[..., n:end, :] = rows[..., to_device(entries, rows.device), :]


class Attention(nn.Module):
    """Grouped-query attention: H query heads share G key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Rope, mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden); ``layer`` is the number within the ``cache``."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)  # (B, T, G, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, G, T, D)
        if self.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        # Together: for a few tokens, it is the number of operations that takes time.
        rotated = rotate(torch.cat((q, k), dim=2), *rope).transpose(1, 2)  # (B, H+G, T, D)
        q, k = rotated.tensor_split((q.shape[2],), dim=1)
        if cache is None:
            attended = attention(q, k, v, mask)  # (B, T, H·D)
        else:
            attended = cache.attend(layer, q, k, v, mask)
        return self.o_proj(attended)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: Rope, mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """All of a Llama but its head; a module of its own because the checkpoint's names say so."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The whole model; ``model(tokens)``, (B, T) -> (B, T, V), is the causal language model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.frequencies = rope_frequencies(config)  # no buffer, so that it stays in float32
        # As a draft: the defaults of drafting in its config.json (options.DEFAULTS).
        self.drafting: dict[str, Any] = {}

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def new_cache(self, first: int = 0, end: int | None = None) -> KVCache:
        """An empty KV cache for layers first..end-1."""
        layers = len(self.model.layers[first:end])
        sizes = (2, layers, 1, self.config.num_key_value_heads, 0, self.config.head_dim)
        return KVCache(torch.empty(sizes, device=self.device, dtype=self.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> hidden states (B, T, hidden) that enter layer 0."""
        return self.model.embed_tokens(tokens)

    def run_layers(
        self,
        hidden: Tensor,
        first: int = 0,
        end: int | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Run hidden states (B, T, hidden) through layers first..end-1: (B, T, hidden).

        Args:
            positions: (T,) in float32, for the rotary embedding; by default S..S+T-1.
            mask: (T, S+T), 0 where a row attends to a column and -inf elsewhere (mask.py); by
                default attention is causal.
            cache: of these layers. It holds S positions, and the T new ones are added; B is 1 then.
        """
        T = hidden.shape[1]
        S = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(S, S + T, dtype=torch.float32, device=hidden.device)
        if self.frequencies.device != hidden.device:
            self.frequencies = to_device(self.frequencies, hidden.device)
        angles = positions[:, None, None] * self.frequencies  # (T, 1, D)
        rope = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        mask = self.mask_by_head(mask, S, T, hidden)
        if cache is not None:
            cache.extend(T)
        for layer, block in enumerate(islice(self.model.layers, first, end)):
            hidden = block(hidden, rope, mask, cache, layer)
        return hidden

    def mask_by_head(self, mask: Tensor | None, S: int, T: int, like: Tensor) -> Tensor | None:
        """A ``mask`` (T, S+T), or the causal one, as ``attention`` takes it: (H/G·T, S+T)."""
        if mask is None and (S == 0 or T == 1):
            return None  # attention needs none
        if mask is None:
            mask = like.new_full((T, S + T), -torch.inf).triu(S + 1)
        return mask.repeat(self.config.num_attention_heads // self.config.num_key_value_heads, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., hidden) after any layer -> logits (..., V)."""
        return self.lm_head(self.model.norm(hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), without a cache."""
        return self.logits(self.run_layers(self.embed(tokens)))
