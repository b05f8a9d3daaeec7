"""config.json of a Hugging Face folder <-> LlamaConfig. Knows nothing about tensors."""

import json
from pathlib import Path

from ..model import LlamaConfig


def read_config(path):
    """config.json of a folder, as transformers 4 or 5 writes it -> LlamaConfig."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no model folder at {path}")
    raw = read_json(path / "config.json")
    try:
        return config_from_dict(raw)
    except KeyError as missing:
        raise ValueError(f"{path}/config.json has no {missing}; it is not a complete Llama config") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}/config.json: {error}") from None


def config_from_dict(raw):
    if raw.get("model_type") != "llama":
        raise ValueError(f"model_type is {raw.get('model_type')!r}; only 'llama' is supported")
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if raw.get(key, plain) != plain:
            raise ValueError(f"{key} is {raw[key]!r}; only {plain!r} is supported")
    # transformers 5 keeps theta and scaling together in rope_parameters; 4 has rope_theta beside rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "linear"):
        raise ValueError(f"rope type {rope_type!r} is not supported; only 'default' and 'linear' are")
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(raw[key], int) or raw[key] < 1:
            raise ValueError(f"{key} is {raw[key]!r}; expected a positive whole number")
    heads, eos = raw["num_attention_heads"], raw.get("eos_token_id", 2)
    config = LlamaConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        rope_factor=float(rope["factor"]) if rope_type == "linear" else 1.0,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        bos_token_id=raw.get("bos_token_id", 1),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        exit_layers=tuple(raw.get("exit_layers", ())),
        thresholds=tuple(float(t) for t in raw.get("thresholds", ())),
        draft_length=raw.get("draft_length", 6),
        draft_stop=float(raw.get("draft_stop", 0.0)),
        draft_tree=tuple(raw.get("draft_tree", (10, 4, 60))),
    )
    if heads % config.num_key_value_heads:
        raise ValueError(f"{heads} attention heads cannot share {config.num_key_value_heads} key/value heads evenly")
    if config.thresholds and len(config.thresholds) != len(config.exit_layers):
        raise ValueError(f"{len(config.exit_layers)} exit_layers cannot have {len(config.thresholds)} thresholds")
    if len(config.draft_tree) != 3:
        raise ValueError(f"draft_tree is {list(config.draft_tree)}; expected three numbers: top_k, depth, size")
    if not 0.0 <= config.draft_stop <= 1.0:
        raise ValueError(f"draft_stop is {config.draft_stop}; expected a confidence within 0..1")
    return config


def config_to_dict(config, dtype):
    """LlamaConfig -> config.json of a checkpoint whose tensors are of ``dtype``, as transformers 4 wrote it and 5 reads it."""
    linear = {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": config.rope_factor}}
    drafting = {
        "exit_layers": list(config.exit_layers),
        "thresholds": list(config.thresholds),
        "draft_length": config.draft_length,
        "draft_stop": config.draft_stop,
        "draft_tree": list(config.draft_tree),
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **(linear if config.rope_factor != 1.0 else {}),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) > 1 else config.eos_token_ids[0],
        "torch_dtype": str(dtype).removeprefix("torch."),
        **(drafting if config.exit_layers else {}),
    }


def read_json(path):
    """A JSON object from a file; FileNotFoundError and ValueError say in one line what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
    return raw
