"""config.json of a Hugging Face folder <-> LlamaConfig: every field is validated here. Knows nothing about tensors."""

import json
import math
from dataclasses import replace
from pathlib import Path

from ..model import LlamaConfig

LARGEST = 2**24  # for sizes: far above any Llama, far below what cannot be computed with


def read_config(path):
    """config.json of a folder, as transformers 4 or 5 writes it -> LlamaConfig."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no model folder at {path}")
    raw = read_json(path / "config.json")
    try:
        config = config_from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{path}/config.json: {error}") from None
    return replace(config, eos_token_ids=answer_ends(path, config))


def answer_ends(path, config):
    """The ids at which a folder's model ends an answer.

    generation_config.json has the last word over config.json; and where the tokenizer calls a token its end, as chat models
    do with the end of a turn, that is one too.
    """
    ids, generation, tokenizer = (
        config.eos_token_ids,
        path / "generation_config.json",
        path / "tokenizer_config.json",
    )
    raw = read_json_if_there(generation)
    try:
        ids = ids if raw.get("eos_token_id") is None else eos_ids(raw, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{generation}: {error}") from None
    raw = read_json_if_there(tokenizer)
    end, added = (
        text_of(raw.get("eos_token")),
        {number: text for number, (text, _) in added_tokens(raw).items()},
    )
    if (
        end and not added and (path / "tokenizer.json").is_file()
    ):  # transformers 5 leaves them there alone
        every = read_json(path / "tokenizer.json").get("added_tokens")
        every = (
            [token for token in every if isinstance(token, dict)] if isinstance(every, list) else []
        )
        added = {token["id"]: text_of(token) for token in every if type(token.get("id")) is int}
    ids += tuple(
        number for number, text in added.items() if text == end and 0 <= number < config.vocab_size
    )
    return tuple(dict.fromkeys(ids))


def added_tokens(raw):
    """{id: (text, whether it is special)} of the tokens that a tokenizer_config.json says were added."""
    added = raw.get("added_tokens_decoder")
    every = added.items() if isinstance(added, dict) else ()
    return {int(number[:9]): (text_of(token), bool(isinstance(token, dict) and token.get("special")))
            for number, token in every if number.isdecimal() and text_of(token)}  # fmt: skip


def text_of(token):
    """A special token's text, which tokenizer_config.json may put into an object; None where it is neither."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def config_from_dict(raw):
    """The fields of a config.json -> LlamaConfig; ValueError names the first that is missing, wrong or not supported."""
    if raw.get("model_type") != "llama":
        raise ValueError(f"model_type is {shown(raw.get('model_type'))}; only 'llama' is supported")
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if raw.get(key) not in (None, plain):
            raise ValueError(f"{key} is {shown(raw[key])}; only {plain!r} is supported")
    heads, hidden_size = whole(raw, "num_attention_heads"), whole(raw, "hidden_size")
    vocab_size, layers = whole(raw, "vocab_size"), whole(raw, "num_hidden_layers", high=1024)
    head_dim = whole(raw, "head_dim", hidden_size // heads, high=1024)
    kv_heads = whole(raw, "num_key_value_heads", heads)
    if head_dim % 2 or not head_dim:
        raise ValueError(
            f"head_dim is {head_dim}; the rotary embedding needs an even number above 0"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
    positions = whole(raw, "max_position_embeddings", 2048, high=2**22)
    if positions * head_dim > 2**27:  # far above any Llama; the rotary table would take gigabytes
        raise ValueError(
            f"max_position_embeddings {positions} with head_dim {head_dim} is more than can be computed with"
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=whole(raw, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6, low=0.0, high=1.0),
        **read_rope(raw),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", False),
        bos_token_id=None
        if raw.get("bos_token_id", 1) is None
        else whole(raw, "bos_token_id", 1, 0, vocab_size - 1),
        eos_token_ids=eos_ids(raw, vocab_size),
        **read_drafting(raw, layers),
    )


def read_rope(raw):
    """What config.json says about rotation; transformers 5 keeps it in rope_parameters, 4 has rope_theta beside rope_scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), dict | None):
            raise ValueError(f"{key} is {shown(raw[key])}; expected an object or null")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"rope type {shown(kind)} is not supported; only 'default', 'linear' and 'llama3' are"
        )
    if number(rope, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor is not 1; that is not supported")
    read = {
        "rope_theta": number(rope if "rope_theta" in rope else raw, "rope_theta", 10000.0, low=1.0)
    }
    if kind != "default":
        read["rope_factor"] = number(rope, "factor", low=1e-3)
    if kind == "llama3":
        low, high = (
            number(rope, "low_freq_factor", low=0.0),
            number(rope, "high_freq_factor", low=0.0),
        )
        if low >= high:
            raise ValueError(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        context = whole(raw, "max_position_embeddings", 2048)
        read["rope_llama3"] = low, high, whole(rope, "original_max_position_embeddings", context)
    return read


def read_drafting(raw, layers):
    """What only a draft has: its exits and how it drafts unless told otherwise."""
    exits = numbers(raw, "exit_layers", lambda item: whole(item, "exit_layers", high=1024))
    thresholds = numbers(
        raw, "thresholds", lambda item: number(item, "thresholds", low=0.0, high=1.0)
    )
    tree = numbers(raw, "draft_tree", lambda item: whole(item, "draft_tree"), (10, 4, 60))
    if list(exits) != sorted(set(exits)) or exits and exits[-1] > layers:
        raise ValueError(
            f"exit_layers is {list(exits)}; exits must increase and lie within the draft's {layers} layers"
        )
    if thresholds and len(thresholds) != len(exits):
        raise ValueError(f"{len(exits)} exit_layers cannot have {len(thresholds)} thresholds")
    if len(tree) != 3:
        raise ValueError(f"draft_tree is {list(tree)}; expected three numbers: top_k, depth, size")
    return {
        "exit_layers": exits,
        "thresholds": thresholds,
        "draft_length": whole(raw, "draft_length", 6),
        "draft_stop": number(raw, "draft_stop", 0.0, low=0.0, high=1.0),
        "draft_tree": tree,
    }


def eos_ids(raw, vocab_size):
    """The ids at which an answer ends: one, a list, or none (null)."""
    given = raw.get("eos_token_id", 2)
    if given is None:
        return ()
    given = given if isinstance(given, list) else [given]
    if not given:
        raise ValueError("eos_token_id is []; expected a token id, a list of them, or null")
    return tuple(
        whole({"eos_token_id": token}, "eos_token_id", low=0, high=vocab_size - 1)
        for token in given
    )


# ------------------------------------------------------------------------------------------------------- single fields


def shown(value):
    """A value as it may stand in a message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def field(raw, key, default):
    """raw[key], or the default where it is missing or null."""
    value = raw.get(key)
    if value is None and default is None:
        raise ValueError(
            f"it has no {key!r}" if key not in raw else f"{key} is null; expected a value"
        )
    return default if value is None else value


def whole(raw, key, default=None, low=1, high=LARGEST):
    value = field(raw, key, default)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is {shown(value)}; expected a whole number within {low}..{high}")
    return value


def number(raw, key, default=None, low=-math.inf, high=1e30):
    value = field(raw, key, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(f"{key} is {shown(value)}; expected a number within {low:g}..{high:g}")
    return float(value)


def flag(raw, key, default):
    value = field(raw, key, default)
    if type(value) is not bool:
        raise ValueError(f"{key} is {shown(value)}; expected true or false")
    return value


def numbers(raw, key, read, default=()):
    """A list of numbers, each through ``read``, which is given {key: item}."""
    value = field(raw, key, list(default))
    if not isinstance(value, list):
        raise ValueError(f"{key} is {shown(value)}; expected a list of numbers")
    return tuple(read({key: item}) for item in value)


# ------------------------------------------------------------------------------------------------------------- writing


def config_to_dict(config, dtype):
    """LlamaConfig -> config.json of a checkpoint whose tensors are of ``dtype``, as transformers 4 wrote it and 5 reads it."""
    rope = {"type": "linear", "rope_type": "linear", "factor": config.rope_factor}
    if config.rope_llama3:
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            **dict(zip(names, config.rope_llama3)),
        }
    drafting = {
        "exit_layers": list(config.exit_layers),
        "thresholds": list(config.thresholds),
        "draft_length": config.draft_length,
        "draft_stop": config.draft_stop,
        "draft_tree": list(config.draft_tree),
    }
    eos = list(config.eos_token_ids)
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
        **({"rope_scaling": rope} if config.rope_factor != 1.0 or config.rope_llama3 else {}),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else eos[0] if eos else None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **(drafting if config.exit_layers else {}),
    }


def read_json_if_there(path):
    """As ``read_json``; an empty object where there is no file."""
    return read_json(path) if path.is_file() else {}


def read_json(path):
    """A JSON object from a file; FileNotFoundError and ValueError say in one line what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({shown(str(error))[1:-1]})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
    return raw
