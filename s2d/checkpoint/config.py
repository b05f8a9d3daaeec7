"""config.json of a Hugging Face folder <-> LlamaConfig; other models are refused.

The models are Llama, Qwen2 (which is also Qwen2.5's architecture) and Qwen3.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..model import Drafting, LlamaConfig
from ..options import default_thresholds
from .files import read_json

# {model_type: (its name in "architectures", the fields of LlamaConfig that it switches on)}
KINDS = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
}
# What changes the model unless it is as here, or missing, or null.
PLAIN = {"attention_bias": [False], "mlp_bias": [False], "quantization_config": [None]}
PLAIN |= {"hidden_act": ["silu", "swish"], "partial_rotary_factor": [1]}
LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(path: Path | str) -> LlamaConfig:
    """config.json of the folder ``path``, as transformers 4 or 5 writes it -> LlamaConfig.

    As in transformers, generation_config.json has the last word on the tokens that end an answer.
    Raises FileNotFoundError for a missing folder or file, and ValueError.
    """
    if not Path(path).is_dir():
        raise FileNotFoundError(f"no model folder at {path}")
    file = Path(path, "config.json")
    raw = read_json(file)
    eos = read_json(Path(path, "generation_config.json"), missing={}).get("eos_token_id")
    try:
        return config_from_dict(raw if eos is None else raw | {"eos_token_id": eos})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from None


def config_from_dict(raw: dict[str, Any]) -> LlamaConfig:
    """The fields of a config.json -> LlamaConfig; ValueError for another model."""
    kind = raw.get("model_type") or "llama"
    if kind not in KINDS:
        raise ValueError(f"model_type is {kind!r}; only {', '.join(KINDS)} are supported")
    architecture, switched_on = KINDS[kind]
    for name in raw.get("architectures") or []:
        if name.lower() != architecture.lower():  # many write LLaMAForCausalLM
            raise ValueError(f"architectures has {name!r}; only {architecture} is supported")
    for key, plain in PLAIN.items():
        always = kind == "qwen2" and key == "attention_bias"  # it has these biases in any case
        if raw.get(key) is not None and raw[key] not in plain and not always:
            raise ValueError(f"{key} is {raw[key]!r}; only {plain[0]!r} is supported")
    layers = number(raw, "num_hidden_layers")
    if has_window(raw, kind, layers):
        raise ValueError("some layers have a sliding window; only full attention is supported")
    heads = number(raw, "num_attention_heads")
    head_dim = 128 if kind == "qwen3" else number(raw, "hidden_size") // heads
    sizes = {"num_key_value_heads": heads, "head_dim": head_dim, "max_position_embeddings": 2048}
    sizes = {key: number(raw, key, default) for key, default in sizes.items()}
    if heads % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        shown = f"{sizes['num_key_value_heads']} key/value heads of size {sizes['head_dim']}"
        raise ValueError(f"{heads} attention heads cannot share {shown}")
    vocab_size = number(raw, "vocab_size")
    eos = raw.get("eos_token_id", 2 if kind == "llama" else None)
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=number(raw, "hidden_size"),
        intermediate_size=number(raw, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **sizes,
        **read_rope(raw),
        **switched_on,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6, float),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        bos_token_id=raw.get("bos_token_id", 1 if kind == "llama" else None),
        # Some files have the id of no token, such as -1; it ends no answer.
        eos_token_ids=tuple(token for token in eos if 0 <= token < vocab_size),
        drafting=read_drafting(raw, layers),
    )


def number(raw: dict[str, Any], key: str, default: float | None = None, kind: type = int) -> Any:
    """raw[key], a number above 0 of this ``kind``, or the default if it is missing or null."""
    value = default if raw.get(key) is None else raw[key]
    if type(value) not in (int, kind) or not 0 < value < 2**40:
        noun = "whole number" if kind is int else "number"
        raise ValueError(f"{key} is {value!r}; expected a {noun} above 0")
    return kind(value)


def has_window(raw: dict[str, Any], kind: str, layers: int) -> bool:
    """Whether a layer attends to a window alone, by the keys and defaults of transformers."""
    if raw.get("layer_types") is not None:
        return set(raw["layer_types"]) != {"full_attention"}
    on = kind != "llama" and raw.get("use_sliding_window")
    window = raw.get("sliding_window", 4096)
    return bool(on) and window is not None and raw.get("max_window_layers", 28) < layers


def read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of LlamaConfig about the rotary embedding, in either of transformers' forms.

    Version 4 has ``rope_theta`` and ``rope_scaling``, version 5 one object ``rope_parameters``.
    """
    rope = {"rope_theta": raw.get("rope_theta")}
    rope |= raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported; only default, linear and llama3")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor: only 1 is supported")
    read = {"rope_theta": number(rope, "rope_theta", 10000, float)}
    if kind != "default":
        read["rope_factor"] = number(rope, "factor", None, float)
    if kind == "llama3":  # a length outside of the rope's own object has the last word
        context = raw.get(LLAMA3[2]) or rope.get(LLAMA3[2]) or raw.get("max_position_embeddings")
        low, high = (number(rope, key, None, float) for key in LLAMA3[:2])
        if low >= high:
            raise ValueError(f"low_freq_factor {low} is not below high_freq_factor {high}")
        read["rope_llama3"] = (low, high, number({LLAMA3[2]: context}, LLAMA3[2], 2048))
    return read


def read_drafting(raw: dict[str, Any], layers: int) -> Drafting | None:
    """How a draft of so many ``layers`` drafts: keys that only this project knows.

    Without ``exit_layers`` there are no sorted exits; without ``thresholds`` they are the default.
    """
    if raw.get("exit_layers") is None:
        return None
    exits = tuple(number({"exit": each}, "exit") for each in raw["exit_layers"])
    thresholds = tuple(map(float, raw.get("thresholds") or default_thresholds(len(exits))))
    if list(exits) != sorted(set(exits)) or not exits or exits[-1] > layers:
        raise ValueError(f"exit_layers must increase up to {layers}, got {list(exits)}")
    tree = tuple(number({"tree": n}, "tree") for n in raw.get("draft_tree") or Drafting.tree)
    stop = float(raw.get("draft_stop", Drafting.stop))
    if not all(0 <= each <= 1 for each in (*thresholds, stop)) or len(thresholds) != len(exits):
        raise ValueError(
            "thresholds and draft_stop are from 0 to 1, with a threshold for each exit"
        )
    if len(tree) != 3:
        raise ValueError("draft_tree has 3 numbers: top_k, depth and size")
    return Drafting(exits, thresholds, number(raw, "draft_length", Drafting.length), stop, tree)


def config_to_dict(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """LlamaConfig -> config.json of weights in ``dtype``, as transformers 4 and 5 read it."""
    raw = asdict(replace(config, drafting=None)) | {
        "hidden_act": "silu",
        "torch_dtype": str(dtype).split(".")[-1],
    }
    switched_on = {name: True for name in ("qkv_bias", "qk_norm") if raw.pop(name)}
    kind = next((kind for kind, (_, fields) in KINDS.items() if fields == switched_on), None)
    if kind is None:
        raise ValueError("no published architecture has both biases and norms of queries and keys")
    raw |= {"model_type": kind, "architectures": [KINDS[kind][0]]}
    factor, llama3 = raw.pop("rope_factor"), raw.pop("rope_llama3")
    if factor != 1.0:
        rope = {"rope_type": "llama3" if llama3 else "linear", "factor": factor}
        raw["rope_scaling"] = rope | dict(zip(LLAMA3, llama3 or ()))
    eos = raw.pop("eos_token_ids")
    raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    del raw["drafting"]
    if drafting := config.drafting:
        raw |= {"exit_layers": drafting.exits, "thresholds": drafting.thresholds}
        raw |= {"draft_length": drafting.length, "draft_stop": drafting.stop}
        raw["draft_tree"] = drafting.tree
    return raw
