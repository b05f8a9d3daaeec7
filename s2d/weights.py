"""A Hugging Face folder (config.json, one or many safetensors files) <-> a Llama. Knows nothing about decoding."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from .model import Llama, LlamaConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer_config.json")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(path, device="cpu", dtype="auto", num_layers=None):
    """Load a Llama from ``path``, tensor by tensor straight onto ``device``.

    ``dtype`` is "auto" (bfloat16 on a GPU, float32 on the CPU) or one of float64, float32, float16, bfloat16.
    ``num_layers`` keeps only the first layers. Raises FileNotFoundError for a missing folder or file and ValueError
    for anything that is not a Llama this project can run.
    """
    path, device = Path(path), check_device(device)
    config = read_config(path)
    if num_layers is not None:
        if not 1 <= num_layers <= config.num_hidden_layers:
            raise ValueError(f"{path}: cannot keep the first {num_layers} of {config.num_hidden_layers} layers")
        config = replace(config, num_hidden_layers=num_layers, exit_layers=(), thresholds=())
    with torch.device("meta"):
        model = Llama(config)
    wanted = dict(model.named_parameters())
    dtype = _dtype(dtype, device)
    for name, tensor in _read_tensors(path, wanted, device):
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {tuple(tensor.shape)}, config.json asks for "
                f"{tuple(wanted[name].shape)}; the two do not belong together"
            )
        parent, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(tensor.to(dtype), requires_grad=False)
        setattr(model.get_submodule(parent), leaf, parameter)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model["embed_tokens"].weight
    return model.to(device=device, dtype=dtype).eval()  # moves what is left: the rotary table


def save_model(model, path, tokenizer_from=None, dtype=torch.bfloat16, max_shard_bytes=5 * 2**30):
    """Write ``model`` as a Hugging Face folder that transformers loads as LlamaForCausalLM.

    ``tokenizer_from`` is a folder whose tokenizer files are copied along. Everything is written under a temporary name
    first, so ``path`` is either complete or as it was.
    """
    path = Path(path)
    stage = path.with_name(path.name + ".partial")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    for name in TOKENIZER_FILES if tokenizer_from else ():
        if (Path(tokenizer_from) / name).is_file():
            shutil.copyfile(Path(tokenizer_from) / name, stage / name)
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in model.named_parameters()}
    _write_tensors(tensors, stage, max_shard_bytes)
    (stage / "config.json").write_text(json.dumps(_config_to_dict(model.config, dtype), indent=2) + "\n")
    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        os.replace(stage, path)
        shutil.rmtree(old)
    else:
        os.replace(stage, path)


def read_config(path):
    """config.json of a folder, as transformers 4 or 5 writes it -> LlamaConfig."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no model folder at {path}")
    raw = _read_json(path / "config.json")
    try:
        return _config_from_dict(raw)
    except KeyError as missing:
        raise ValueError(f"{path}/config.json has no {missing}; it is not a complete Llama config") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}/config.json: {error}") from None


def _config_from_dict(raw):
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
        draft_tree=tuple(raw.get("draft_tree", (10, 4, 60))),
    )
    if heads % config.num_key_value_heads:
        raise ValueError(f"{heads} attention heads cannot share {config.num_key_value_heads} key/value heads evenly")
    if config.thresholds and len(config.thresholds) != len(config.exit_layers):
        raise ValueError(f"{len(config.exit_layers)} exit_layers cannot have {len(config.thresholds)} thresholds")
    if len(config.draft_tree) != 3:
        raise ValueError(f"draft_tree is {list(config.draft_tree)}; expected three numbers: top_k, depth, size")
    return config


def _config_to_dict(config, dtype):
    linear = {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": config.rope_factor}}
    drafting = {
        "exit_layers": list(config.exit_layers),
        "thresholds": list(config.thresholds),
        "draft_length": config.draft_length,
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


def _read_tensors(path, wanted, device):
    """Yield (name, tensor) for every wanted name, opening one shard at a time."""
    if (path / INDEX).is_file():
        located = _read_json(path / INDEX).get("weight_map", {})
    elif (path / SINGLE).is_file():
        located = dict.fromkeys(wanted, SINGLE)
    else:
        raise FileNotFoundError(f"{path} has neither {SINGLE} nor {INDEX}")
    for name in wanted:
        if name not in located:
            raise ValueError(f"{path}: tensor {name} is in no shard of {INDEX}")
    for file in sorted({located[name] for name in wanted}):
        if not (path / file).is_file():
            raise FileNotFoundError(f"{path}: shard {file} is missing; download it again")
        try:
            with safe_open(path / file, framework="pt", device=str(device)) as shard:
                present = set(shard.keys())
                for name in (name for name in wanted if located[name] == file):
                    if name not in present:
                        raise ValueError(f"{path / file} has no tensor {name}, which config.json asks for")
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path / file} is damaged ({error}); download it again") from None


def _write_tensors(tensors, folder, max_shard_bytes):
    """One file if it fits, else numbered shards and their index."""
    shards, room = [{}], max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _read_json(path):
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
    return raw


def check_device(device):
    """A device's name -> torch.device; raises ValueError for one that is unknown or not here."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; expected cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no GPU here; use --device cpu")
    return device


def _dtype(dtype, device):
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
