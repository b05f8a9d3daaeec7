"""Llama in one page. Knows nothing about files or decoding.

A forward pass is ``embed`` -> ``run_layers`` -> ``logits``; each can be called on its own, so that a decoder can stop
after any layer, read the logits there, and go on later from the hidden states it kept. Parameters carry the names of
Hugging Face checkpoints, which therefore load without a mapping.
"""

import math
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend

from .cache import KVCache

# Attention for decoding, where lengths change at every step. cuDNN's, which PyTorch prefers on the newest GPUs, is left
# out: for each new length it would first spend tens of milliseconds on a plan.
DECODING_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture of a Llama; the names are those of Hugging Face's config.json."""

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
    rope_factor: float = 1.0  # rope scaling: frequencies are divided by it, all of them unless
    rope_llama3: tuple[float, float, int] | None = (
        None  # low and high frequency factor, original context: see rope_frequencies
    )
    tie_word_embeddings: bool = False
    bos_token_id: int = 1
    eos_token_ids: tuple[int, ...] = (2,)
    exit_layers: tuple[
        int, ...
    ] = ()  # only a draft has them: the layers after which it may predict
    thresholds: tuple[float, ...] = ()  # one for each exit: the confidence that is enough there
    draft_length: int = 6  # the chain it drafts unless told otherwise,
    draft_stop: float = 0.0  # which ends before where the last exit's confidence is below this
    draft_tree: tuple[int, int, int] = (
        10,
        4,
        60,
    )  # the tree it grows unless told otherwise: top_k, depth, size


class RMSNorm(nn.Module):
    """x / rms(x) * weight. Half-precision input is normalised in float32, then multiplied, as Llama was trained."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * self.weight


def rope_table(config):
    """Rotary embedding's cosines and sines for every position, (max_position_embeddings, D) float32 each.

    Dimension i is rotated together with i + D/2; the sines of the first half carry the minus sign of that rotation, so
    that ``rotate`` is one multiply and one fused multiply-add. Su et al. 2021, section 3.4.
    """
    frequencies = rope_frequencies(
        config.head_dim, config.rope_theta, config.rope_factor, config.rope_llama3
    )
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)  # (max_positions, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope_frequencies(head_dim, theta, factor, llama3):
    """Radians by which each pair of dimensions turns from one position to the next, (D/2,) float32; see LlamaConfig.

    For contexts longer than a model was first trained on they are divided by ``factor``: all of them, or with ``llama3``
    only those that turn less than low times within the original context, none that turn more than high times, and in
    between a blend (Llama 3.1).
    """
    # The device is named so that the table is real even when the parameters are built on the meta device.
    frequencies = 1.0 / theta ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    )
    if llama3 is None:
        return frequencies / factor
    low, high, context = llama3
    turns = context / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / factor + kept * frequencies


def rotate(x, cos, sin):
    """Apply the rotary embedding to x (B, H, T, D) with cos and signed sin (T, D)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def attend(q, k, v, mask):
    """Attention of T queries (B, H, T, D) to S+T keys and values (B, G, S+T, D): (B, H, T, D).

    ``mask`` (R, S+T) is about the last R queries. Those before them are causal: kernels do that without a mask if there
    is just one, or if S = 0. So a prompt needs no square mask.
    """
    T, gqa = q.shape[2], q.shape[1] != k.shape[1]
    if T == 1 and gqa:  # the heads of a group as queries: keys and values are read once
        grouped = q.reshape(*k.shape[:2], -1, q.shape[3])  # (B, G, H/G, D)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, enable_gqa=gqa)
    R = mask.shape[-2]
    if R == T:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    prompt = attend(q[:, :, :-R], k[:, :, :-R], v[:, :, :-R], None)
    return torch.cat((prompt, attend(q[:, :, -R:], k, v, mask)), dim=2)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share G key/value heads."""

    def __init__(self, config):
        super().__init__()
        heads, kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x, rope, mask, cache, layer):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, G, T, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, G, T, D)
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.write(layer, k, v)  # (B, G, S+T, D)
        return self.o_proj(attend(q, k, v, mask).transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, mask, cache, layer):
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model; ``model(tokens)`` is the plain causal language model, (B, T) -> (B, T, V)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        # One level of nesting only to keep the checkpoint's names: model.embed_tokens, model.layers, model.norm.
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight
        cos, sin = rope_table(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self.register_buffer("draft_vocabulary", None, persistent=False)  # see keep_tokens
        self.register_buffer("draft_head", None, persistent=False)
        self.mesh = None  # of a model that is divided among processes (extras/parallel.py)

    @property
    def device(self):
        return self.lm_head.weight.device

    @property
    def dtype(self):
        return self.lm_head.weight.dtype

    def new_cache(self, capacity, start=0, stop=None, batch=1):
        """An empty KVCache of ``capacity`` positions for layers start..stop-1."""
        config, stop = self.config, self.config.num_hidden_layers if stop is None else stop
        return KVCache(
            stop - start,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
            self.device,
            self.dtype,
            batch,
        )

    def embed(self, tokens):
        """Tokens (B, T) -> hidden states (B, T, hidden) that enter layer 0."""
        return self.model["embed_tokens"](tokens)

    def run_layers(self, hidden, start=0, stop=None, positions=None, mask=None, cache=None):
        """Run layers start..stop-1 on hidden states (B, T, hidden); returns (B, T, hidden).

        By default the T positions follow the S that ``cache`` holds (none without a cache) and attention is causal.
        ``positions`` (T,) and ``mask`` say otherwise. The mask (R, C) is added to attention scores: it tells what the
        last R positions see of the last C, 0 for yes and -inf for no; all before those they see. Where S > 0, R is T.
        Rows of a batch that differ have positions (B, 1, T) and a mask (B, 1, R, C).
        """
        T, S = hidden.shape[1], 0 if cache is None else cache.length
        where = slice(S, S + T) if positions is None else positions
        rope = self.rope_cos[where], self.rope_sin[where]  # (T, D) each
        if mask is None and S > 0 and T > 1:
            mask = torch.full((T, T), -torch.inf, device=hidden.device, dtype=hidden.dtype).triu(
                diagonal=1
            )
        if mask is not None:
            mask = widened(mask, S + T)
        for index, block in enumerate(islice(self.model["layers"], start, stop)):
            hidden = block(hidden, rope, mask, cache, index)
        if cache is not None:
            cache.advance(T)
        return hidden

    def logits(self, hidden):
        """Hidden states after any layer (..., hidden) -> next-token logits (..., V) through final norm and LM head."""
        return self.lm_head(self.model["norm"](hidden))

    def keep_tokens(self, tokens):
        """Let ``draft_logits`` be about the given ``tokens`` (K,) alone, the only ones that this model drafts.

        With a large vocabulary the LM head costs as much as many layers, and a draft looks through it at every exit (Zhao et
        al. 2025, arXiv 2502.14856).
        """
        self.draft_vocabulary = tokens.to(self.device)
        head, by_columns = (
            self.lm_head.weight.detach()[self.draft_vocabulary],
            self.lm_head.weight.stride(0) == 1,
        )
        self.draft_head = (
            head.t().contiguous().t() if by_columns else head
        )  # (K, hidden), in the order of the whole head

    def draft_logits(self, hidden):
        """As ``logits``, for the K tokens of ``draft_vocabulary`` only: (..., K). Without one, all V."""
        if self.draft_vocabulary is None:
            return self.logits(hidden)
        learning = self.lm_head.weight.requires_grad
        head = self.lm_head.weight[self.draft_vocabulary] if learning else self.draft_head
        return F.linear(self.model["norm"](hidden), head)

    def forward(self, tokens, positions=None, mask=None, cache=None):
        """Tokens (B, T) -> logits (B, T, V); arguments as in ``run_layers``."""
        return self.logits(
            self.run_layers(self.embed(tokens), positions=positions, mask=mask, cache=cache)
        )


def widened(mask, length):
    """A mask (R, C) about the last C of ``length`` places -> (R, length): what comes before them is seen.

    Every row begins at a multiple of 16 bytes: GPU kernels refuse other masks, or copy them again in every layer.
    """
    return F.pad(mask, (length - mask.shape[-1], -length % 8))[..., :length]
