"""config.json of a Hugging Face folder <-> LlamaConfig; other models are refused."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..model import LlamaConfig
from .files import read_json


class Architecture(NamedTuple):
    """A kind of Llama: what its config.json leaves unsaid, by the defaults of transformers."""

    bos: int | None = None
    eos: int | None = None
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: bool = False  # whether layers have a sliding window unless the file says otherwise


ARCHITECTURES = {  # by model_type
    "llama": Architecture(bos=1, eos=2),
    "mistral": Architecture(bos=1, eos=2, windows=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True, head_dim=128),
}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
MOST_LAYERS = 1000  # Llama 3.1 405B has 126; a million would take hours to build
# Keys that change what a model computes, unless they are missing, null or as here.
PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "hidden_act": "silu",
    "is_causal": True,
}
LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# How a draft drafts: the keys of config.json that only this project knows, and their names here.
DRAFTING = {
    "exit_layers": "exits",
    "thresholds": "thresholds",
    "draft_length": "draft_length",
    "draft_stop": "stop",
    "draft_tree": "growing",
}


class ModelFolder(NamedTuple):
    """The folder of a model, of which config.json is read, and no weights yet."""

    path: Path
    config: LlamaConfig
    dtype: str  # of the weights; "auto": as they themselves say
    drafting: dict[str, Any]  # see ``read_drafting``


def read_folder(path: Path | str) -> ModelFolder:
    """Read config.json of the folder ``path``, as transformers 4 or 5 writes it.

    As in transformers, generation_config.json has the last word on the tokens that end an answer.
    Raises FileNotFoundError for a missing folder or file, and ValueError.
    """
    file = Path(path, "config.json")
    raw = read_json(file)
    source = file.with_name("generation_config.json")
    generation = read_json(source, missing={})
    try:
        if generation.get("eos_token_id") is not None:
            raw["eos_token_id"] = token_ids(generation["eos_token_id"])
        source = file
        config = config_from_dict(raw)
        drafting = read_drafting(raw)
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "auto"
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype is {dtype!r}; expected auto or one of {', '.join(DTYPES)}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: {error}") from None
    return ModelFolder(file.parent, config, dtype, drafting)


def config_from_dict(raw: dict[str, Any]) -> LlamaConfig:
    """The fields of a config.json -> LlamaConfig; ValueError for another model."""
    kind = raw.get("model_type") or "llama"
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}; only {', '.join(ARCHITECTURES)} are supported")
    architecture = ARCHITECTURES[kind]
    refuse_other_models(raw, kind)
    sizes = {name: number(raw, name) for name in SIZES}
    if sizes["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers: more than {MOST_LAYERS} are not supported")
    heads = sizes["num_attention_heads"]
    kv_heads = number(raw, "num_key_value_heads", heads)
    head_dim = number(raw, "head_dim", architecture.head_dim or sizes["hidden_size"] // heads)
    if heads % kv_heads or head_dim % 2:
        words = f"{heads} attention heads must be a multiple of {kv_heads} key/value heads"
        raise ValueError(f"{words}, and head_dim {head_dim} must be even")
    ends = token_ids(raw.get("eos_token_id", architecture.eos))
    return LlamaConfig(
        **sizes,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=number(raw, "max_position_embeddings", 2048),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6, float),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        bos_token_id=raw.get("bos_token_id", architecture.bos),
        # Some files have the id of no token, such as -1; it ends no answer.
        eos_token_ids=tuple(token for token in ends if 0 <= token < sizes["vocab_size"]),
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        **read_rope(raw),
    )


def refuse_other_models(raw: dict[str, Any], kind: str) -> None:
    """Raise ValueError for a config.json that asks for what is not implemented."""
    only = f"{kind.capitalize()}ForCausalLM"
    for name in raw.get("architectures") or []:
        if name.lower() != only.lower():  # many write LLaMAForCausalLM
            raise ValueError(f"architectures has {name!r}; only {only} is supported")
    for key, plain in PLAIN.items():
        is_fixed = key == "attention_bias" and ARCHITECTURES[kind].qkv_bias  # whatever it says
        if raw.get(key) not in (None, plain) and not is_fixed:
            raise ValueError(f"{key} is {raw[key]!r}; only {plain!r} is supported")
    has_window = ARCHITECTURES[kind].windows or raw.get("use_sliding_window")
    if raw.get("layer_types") is not None:
        has_window = set(raw["layer_types"]) != {"full_attention"}
    if has_window and raw.get("sliding_window", 4096) is not None:  # the default of transformers
        raise ValueError("some layers have a sliding window; only full attention is supported")


def number(raw: dict[str, Any], key: str, default: float | None = None, kind: type = int) -> Any:
    """raw[key], a number above 0 of this ``kind``, or the default if it is missing or null."""
    value = default if raw.get(key) is None else raw[key]
    if type(value) not in (int, kind) or not 0 < value < 2**40:
        noun = "whole number" if kind is int else "number"
        raise ValueError(f"{key} is {value!r}; expected a {noun} above 0")
    return kind(value)


def token_ids(value: Any) -> list[int]:
    """The tokens that end an answer: an id, a list of ids, or null."""
    ids = value if isinstance(value, list) else [value]
    if value is None:
        return []
    if any(type(each) is not int for each in ids):  # true is no id
        raise ValueError(f"eos_token_id is {value!r:.60}; expected a token's id or a list of them")
    return ids


def read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of LlamaConfig about the rotary embedding, in either of transformers' forms.

    Version 4 has ``rope_theta`` and ``rope_scaling``, version 5 one object ``rope_parameters``.
    """
    rope = {name: raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope |= raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported; only default, linear and llama3")
    if rope["partial_rotary_factor"] not in (None, 1):
        raise ValueError("partial_rotary_factor: only 1 is supported")
    read = {"rope_theta": number(rope, "rope_theta", 10000, float)}
    if kind != "default":
        read["rope_factor"] = number(rope, "factor", kind=float)
    if kind == "llama3":
        low, high, length = LLAMA3
        # A length outside of the rope's own object has the last word.
        rope[length] = raw.get(length) or rope.get(length) or raw.get("max_position_embeddings")
        factors = number(rope, low, kind=float), number(rope, high, kind=float)
        read["rope_llama3"] = (*factors, number(rope, length, 2048))
    return read


def read_drafting(raw: dict[str, Any]) -> dict[str, Any]:
    """The options by which a draft drafts, if nothing else is asked for.

    They have the names of ``options.DEFAULTS``, and only those are there that the file has. Without
    ``exit_layers`` there are none.
    """
    if not raw.get("exit_layers"):
        return {}
    found = {ours: raw[key] for key, ours in DRAFTING.items() if raw.get(key) is not None}
    for name in found.keys() & {"exits", "thresholds", "growing"}:
        found[name] = tuple(found[name])
    return found


def config_to_dict(
    config: LlamaConfig, dtype: torch.dtype, drafting: dict[str, Any]
) -> dict[str, Any]:
    """The config.json of a model with weights in ``dtype``, as transformers 4 and 5 read it."""
    raw = asdict(config)
    parts = raw.pop("qkv_bias"), raw.pop("qk_norm")
    kinds = [kind for kind, each in ARCHITECTURES.items() if (each.qkv_bias, each.qk_norm) == parts]
    raw["model_type"] = kinds[0]  # a Mistral's weights are those of a Llama
    raw["architectures"] = [f"{kinds[0].capitalize()}ForCausalLM"]
    raw["hidden_act"] = "silu"
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    eos = raw.pop("eos_token_ids")
    raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    factor = raw.pop("rope_factor")
    llama3 = raw.pop("rope_llama3")
    if factor != 1.0:
        rope = {"rope_type": "llama3" if llama3 else "linear", "factor": factor}
        raw["rope_scaling"] = rope | dict(zip(LLAMA3, llama3 or ()))
    return raw | {key: drafting[ours] for key, ours in DRAFTING.items() if ours in drafting}
