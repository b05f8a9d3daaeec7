"""config.json of a Hugging Face folder <-> LlamaConfig; other models are refused.

The models are Llama, Qwen2 (which is also Qwen2.5's architecture) and Qwen3.
"""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..files import read_json, refuse_other_than_utf8
from ..model import LlamaConfig
from ..options import Drafting, default_thresholds

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
# {model_type: (its name in "architectures", the fields of LlamaConfig that it switches on)}
KINDS = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
}
REQUIRED = {"attention_bias": False, "mlp_bias": False, "quantization_config": None}
REQUIRED |= {"use_sliding_window": False}
LARGEST = 2**24  # of any size: far above any Llama, and what is larger cannot be computed with
SIZES = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), LARGEST)
SIZES |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1024)
SIZES |= {"head_dim": 256, "max_position_embeddings": 2**20}
LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(path: Path | str) -> LlamaConfig:
    """config.json of the folder ``path``, as transformers 4 or 5 writes it -> LlamaConfig.

    As in transformers, generation_config.json has the last word on the tokens that end an answer,
    and is left out if it cannot be read (``load_model`` says so). Raises FileNotFoundError for a
    missing folder or file, and ValueError.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no model folder at {path}")
    refuse_other_than_utf8(path)
    raw = read_json(path / "config.json")
    with suppress(ValueError, OSError):
        raw |= read_generation_config(path)
    try:
        return config_from_dict(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None


def read_generation_config(path: Path) -> dict[str, int | list[int]]:
    """eos_token_id, if generation_config.json in the folder ``path`` has one.

    Raises ValueError or OSError if the file cannot be read.
    """
    file = path / "generation_config.json"
    eos = read_json(file, missing={}).get("eos_token_id")
    if eos is None:
        return {}
    if not all(type(token) is int for token in (eos if isinstance(eos, list) else [eos])):
        raise ValueError(f"{file}: eos_token_id is {eos!r}; expected whole numbers")
    return {"eos_token_id": eos}


def read_drafting(path: Path | str) -> Drafting:
    """How the draft model in the folder ``path`` drafts: what only a draft's config.json has.

    Without ``exit_layers`` a model predicts after its last layer alone, and without ``thresholds``
    it has the default ones. Raises ValueError.
    """
    file = Path(path) / "config.json"
    try:
        return drafting_from_dict(read_json(file))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from None


def config_from_dict(raw: dict[str, Any]) -> LlamaConfig:
    """The fields of a config.json -> LlamaConfig; ValueError names the first that is wrong."""
    kind = raw.get("model_type") or "llama"
    if kind not in KINDS:
        raise ValueError(f"model_type is {kind!r}; only {', '.join(KINDS)} are supported")
    architecture, switched_on = KINDS[kind]
    for key, only in REQUIRED.items():
        if raw.get(key) not in (None, only):
            raise ValueError(f"{key} is {raw[key]!r}; only {only!r} is supported")
    for name in raw.get("architectures") or []:
        if name.lower() != architecture.lower():  # many write LLaMAForCausalLM
            raise ValueError(f"architectures has {name!r}; only {architecture} is supported")
    for name in raw.get("layer_types") or []:
        if name != "full_attention":
            raise ValueError(f"layer_types has {name!r}; only 'full_attention' is supported")
    if raw.get("hidden_act") not in (None, "silu", "swish"):  # two names of one function
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    heads = read_number(raw, "num_attention_heads")
    defaults = {"num_key_value_heads": heads, "max_position_embeddings": 2048}
    defaults["head_dim"] = read_number(raw, "hidden_size") // heads
    if kind == "qwen3":
        defaults["head_dim"] = 128
    sizes = {key: read_number(raw, key, defaults.get(key), most=SIZES[key]) for key in SIZES}
    if heads % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        shown = f"{sizes['num_key_value_heads']} key/value heads of size {sizes['head_dim']}"
        raise ValueError(f"{heads} attention heads cannot share {shown}")
    eos = raw.get("eos_token_id", 2 if kind == "llama" else None)
    if not isinstance(eos, list):
        eos = [] if eos is None else [eos]
    # Some files have the id of no token, such as -1; it ends no answer.
    eos = [token for token in eos if type(token) is not int or 0 <= token < sizes["vocab_size"]]
    return LlamaConfig(
        **sizes,
        **read_rope(raw),
        **switched_on,
        rms_norm_eps=read_number(raw, "rms_norm_eps", 1e-6, kind=float, least=0, most=1),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        bos_token_id=raw.get("bos_token_id", 1 if kind == "llama" else None),
        eos_token_ids=check_numbers("eos_token_id", eos, least=0, most=sizes["vocab_size"] - 1),
    )


def read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of LlamaConfig about the rotary embedding, in either of transformers' forms.

    Version 4 has ``rope_theta`` and ``rope_scaling``, version 5 one object ``rope_parameters``.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling is {rope!r}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported; only default, linear and llama3")
    rope = {"rope_theta": raw.get("rope_theta")} | rope
    read = {"rope_theta": read_number(rope, "rope_theta", 10000, kind=float, most=1e12)}
    if kind != "default":
        read["rope_factor"] = read_number(rope, "factor", kind=float, least=1e-3)
    if kind == "llama3":
        low = read_number(rope, "low_freq_factor", kind=float, least=1e-3)
        high = read_number(rope, "high_freq_factor", kind=float, least=1e-3)
        if low >= high:
            raise ValueError(f"low_freq_factor {low} is not below high_freq_factor {high}")
        # As in transformers, the one outside of the rope's own object has the last word.
        length = raw.get("max_position_embeddings", 2048)
        own = read_number(rope, "original_max_position_embeddings", length)
        context = read_number(raw, "original_max_position_embeddings", own)
        read["rope_llama3"] = (low, high, context)
    return read


def drafting_from_dict(raw: dict[str, Any]) -> Drafting:
    """The fields of a config.json -> Drafting; ValueError names the first that is wrong."""
    layers = read_number(raw, "num_hidden_layers")
    exits = check_numbers("exit_layers", raw.get("exit_layers") or [layers], most=layers)
    if list(exits) != sorted(set(exits)):
        raise ValueError(f"exit_layers must increase, got {list(exits)}")
    thresholds = raw.get("thresholds") or [*default_thresholds(exits)]
    thresholds = check_numbers("thresholds", thresholds, kind=float, least=0, most=1)
    tree = check_numbers("draft_tree", raw.get("draft_tree") or [*Drafting.tree])
    if len(thresholds) != len(exits) or len(tree) != 3:
        raise ValueError("expected a threshold per exit layer, and draft_tree [top_k, depth, size]")
    length = read_number(raw, "draft_length", Drafting.length)
    stop = read_number(raw, "draft_stop", Drafting.stop, kind=float, least=0, most=1)
    return Drafting(exits, thresholds, length, stop, tree)


def read_number(
    raw: dict[str, Any],
    key: str,
    default: float | None = None,
    kind: type[int] | type[float] = int,
    least: float = 1,
    most: float = LARGEST,
) -> Any:
    """raw[key], or the default if it is missing or null, as an int or a float in a range."""
    value = default if raw.get(key) is None else raw[key]
    fits = type(value) is int or (kind is float and type(value) is float)
    if not fits or not least <= value <= most:
        noun = "a whole number" if kind is int else "a number"
        raise ValueError(f"{key} is {value!r}; expected {noun} from {least} to {most}")
    return kind(value)


def check_numbers(
    key: str,
    values: Any,
    kind: type[int] | type[float] = int,
    least: float = 1,
    most: float = LARGEST,
) -> tuple:
    """A list of such numbers, as a tuple."""
    if not isinstance(values, list):
        raise ValueError(f"{key} is {values!r}; expected a list of numbers")
    return tuple(
        read_number({key: value}, key, kind=kind, least=least, most=most) for value in values
    )


def config_to_dict(
    config: LlamaConfig, dtype: torch.dtype, drafting: Drafting | None = None
) -> dict[str, Any]:
    """LlamaConfig -> config.json of weights in ``dtype``, as transformers 4 and 5 read it.

    ``drafting`` is for a draft model, which also has what ``read_drafting`` reads.
    """
    raw = LLAMA | asdict(config)
    switched_on = {name: True for name in ("qkv_bias", "qk_norm") if raw.pop(name)}
    kinds = [kind for kind, (_, fields) in KINDS.items() if fields == switched_on]
    if not kinds:
        raise ValueError("no published architecture has both biases and norms of queries and keys")
    raw["model_type"] = kinds[0]
    raw["architectures"] = [KINDS[kinds[0]][0]]
    factor = raw.pop("rope_factor")
    llama3 = raw.pop("rope_llama3")
    eos = raw.pop("eos_token_ids")
    if factor != 1.0:
        kind = {"rope_type": "llama3" if llama3 else "linear", "factor": factor}
        raw["rope_scaling"] = kind | dict(zip(LLAMA3, llama3 or ()))
    raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    if drafting is not None:
        raw["exit_layers"] = drafting.exits
        raw["thresholds"] = drafting.thresholds
        raw["draft_length"] = drafting.length
        raw["draft_stop"] = drafting.stop
        raw["draft_tree"] = drafting.tree
    return raw
