"""config.json of a Hugging Face folder <-> DraftConfig. Knows nothing about tensors.

Every field is validated here. What no list names is refused: it may change what a model computes.
"""

from dataclasses import asdict, replace
from pathlib import Path

from ..exits import DraftConfig
from ..fields import errors_name, flag, number, numbers, read_json, refuse_unknown, shown, whole
from ..text.tokenizer_model import read_added_tokens, read_special_tokens

LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# What may stand in an object about rotation, or beside it.
ROPE_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
DRAFTING = ("exit_layers", "thresholds", "draft_length", "draft_stop", "draft_tree")
SIZES = {"num_hidden_layers": 1024, "head_dim": 1024, "max_position_embeddings": 2**22}  # at most
COUNTS = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads"
SIZES |= dict.fromkeys(COUNTS.split(), 2**24)
# What config_from_dict reads. A Llama's config.json may say three kinds of things besides:
READ = {"rope_scaling", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", *ROPE_BESIDE}
READ |= {"bos_token_id", "eos_token_id", *SIZES, *DRAFTING}
# what has one value here,
FALSE = "attention_bias mlp_bias rope_interleaved is_encoder_decoder add_cross_attention"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
ONLY = {"model_type": "llama"} | LLAMA | {"pruned_heads": {}}  # which is told first
ONLY |= dict.fromkeys(["tie_encoder_decoder", *FALSE.split()], False)
# what changes no logits (names, versions, kernels, training, the settings of sampling),
INERT = set(
    "_name_or_path name_or_path transformers_version transformers.js_config torch_dtype dtype "
    "use_bfloat16 torchscript return_dict use_cache output_attentions output_hidden_states "
    "chunk_size_feed_forward pretraining_tp _attn_implementation _attn_implementation_autoset "
    "attn_implementation _flash_attn_2_enabled attention_dropout initializer_range "
    "gradient_checkpointing pad_token_id unk_token_id sep_token_id decoder_start_token_id "
    "tokenizer_class max_sequence_length model_max_length tokenizer_model_max_length is_decoder "
    "is_llama_config id2label label2id num_labels problem_type finetuning_task unsloth_version "
    "unsloth_fixed unsloth_tracked tf_legacy_loss do_sample temperature top_k top_p typical_p "
    "length_penalty max_length num_return_sequences num_beam_groups diversity_penalty "
    "early_stopping output_scores return_dict_in_generate remove_invalid_values".split()
)
# what ``unread_settings`` tells of,
TOLD = {"repetition_penalty", "min_length", "num_beams", "no_repeat_ngram_size"}
TOLD.add("encoder_no_repeat_ngram_size")
# and what is null.
GENERATION = "generation_config.json"
# What it may say besides without a change of greedy text: how text is sampled, how it is computed.
INERT_THERE = set(
    "_from_model_config min_p top_h epsilon_cutoff eta_cutoff max_new_tokens renormalize_logits "
    "cache_implementation cache_config max_cache_len output_logits is_assistant low_memory use_mtp "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind "
    "target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile "
    "continuous_batching_config prefill_chunk_size".split()
)
OFF = dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1)
OFF |= {"num_beams": 1, "guidance_scale": 1}  # 0, null, or an empty list for all others


def read_config(path):
    """config.json of a folder, as transformers 4 or 5 writes it -> DraftConfig."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no model folder at {path}")
    raw = read_json(path / "config.json")
    with errors_name(path / "config.json"):
        config = config_from_dict(raw)
    said = raw.get("eos_token_id") is not None  # and not only the default
    return replace(config, eos_token_ids=answer_ends(path, config, said))


def answer_ends(path, config, said):
    """The ids at which a folder's model ends an answer; ``said``: config.json names some.

    generation_config.json has the last word, and where the tokenizer calls a token its end, as chat
    models do with the end of a turn, that is one too. So lists of several lengths are no
    contradiction (Llama 3's are); one that has nothing in common with what both others say is.
    """
    raw, end = read_json(path / GENERATION, missing={}), tokenizers_end(path, config.vocab_size)
    ids = own = config.eos_token_ids
    if raw.get("eos_token_id") is not None:
        with errors_name(path / GENERATION):
            ids = eos_ids(raw, config.vocab_size)
    if said and own and not {*own, *end}.intersection(ids):
        both = f"{list(own)} in config.json, but {list(ids)} in {GENERATION}"
        raise ValueError(f"{path}: eos_token_id is {both}; make them agree")
    return tuple(dict.fromkeys((*ids, *end)))


def tokenizers_end(path, vocab_size):
    """The id, in a tuple, of the token that the tokenizer's files call its end, if they say it."""
    beside, names = read_special_tokens(path)
    end, _ = read_added_tokens(path, beside).get(names.get("eos_token"), (None, None))
    return () if end is None or not 0 <= end < vocab_size else (end,)


def unread_settings(folder):
    """One line on settings that change transformers' greedy text and are not read here, or None."""
    file = Path(folder) / GENERATION
    file = file if file.is_file() else file.with_name("config.json")
    inert = INERT | INERT_THERE | READ | ONLY.keys()
    values = {key: value for key, value in read_json(file).items() if key not in inert and value}
    found = [f"{key} {shown(values[key])}" for key in values if values[key] != OFF.get(key)]
    if not found:
        return None
    does = "which transformers applies and this project does not: greedy text differs"
    return f"{file} sets {', '.join(found)}, {does}"


def config_from_dict(raw):
    """The fields of a config.json -> DraftConfig; ValueError names the first that is not good."""
    if raw.get("quantization_config") is not None:
        raise ValueError("it has a quantization_config; quantised weights are not supported")
    refuse_unknown(raw | {"model_type": str(raw.get("model_type"))}, READ | INERT | TOLD, ONLY)
    heads = whole(raw, "num_attention_heads")
    defaults = {"num_key_value_heads": heads, "max_position_embeddings": 2048}
    defaults["head_dim"] = whole(raw, "hidden_size") // heads
    sizes = {key: whole(raw, key, defaults.get(key), high=high) for key, high in SIZES.items()}
    kv_heads, head_dim = sizes["num_key_value_heads"], sizes["head_dim"]
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; the rotary embedding needs an even number")
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
    if (positions := sizes["max_position_embeddings"]) * head_dim > 2**27:
        # Far above any Llama; the rotary table would take gigabytes.
        raise ValueError(f"max_position_embeddings {positions} x head_dim {head_dim} is too large")
    if (bos := raw.get("bos_token_id", 1)) is not None:
        bos = whole({"bos_token_id": bos}, "bos_token_id", low=0, high=sizes["vocab_size"] - 1)
    return DraftConfig(
        **sizes,
        **read_rope(raw),
        **read_drafting(raw, sizes["num_hidden_layers"]),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6, low=0.0, high=1.0),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        bos_token_id=bos,
        eos_token_ids=eos_ids(raw, sizes["vocab_size"]),
    )


def read_rope(raw):
    """The fields of DraftConfig about rotation."""
    rope = rope_said(raw)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type {shown(kind)} is not supported; only default, linear, llama3")
    known = {"default": (), "linear": ("factor",), "llama3": ("factor", *LLAMA3)}[kind]
    with errors_name(f"its rotary embedding of type {kind!r}"):
        refuse_unknown(rope, {"rope_type", *ROPE_BESIDE, *known}, {"partial_rotary_factor": 1.0})
    read = {"rope_theta": number(rope, "rope_theta", 10000.0, low=1.0)}
    if kind != "default":
        read["rope_factor"] = number(rope, "factor", low=1e-3)
    if kind == "llama3":
        low, high = (number(rope, key, low=0.0) for key in LLAMA3[:2])
        if low >= high:
            raise ValueError(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        context = whole(rope, LLAMA3[2], whole(raw, "max_position_embeddings", 2048))
        read["rope_llama3"] = low, high, context
    return read


def rope_said(raw):
    """All that config.json says about rotation, in one object; of two that disagree both named."""
    sources = {name: raw.get(name) for name in ("rope_parameters", "rope_scaling")}
    sources["config.json"] = {key: raw.get(key) for key in ROPE_BESIDE}
    rope, where = {}, {}
    for name, said in sources.items():
        if not isinstance(said, dict | None):
            raise ValueError(f"{name} is {shown(said)}; expected an object or null")
        if said and name != "config.json":
            said = {"rope_type": said.get("type") or "default"} | said
        for key, value in (said or {}).items():
            key = "rope_type" if key == "type" else key
            if value is None:
                continue
            if key in rope and rope[key] != value:
                both = f"{shown(rope[key])} in {where[key]}, but {shown(value)} in {name}"
                raise ValueError(f"{key} is {both}; make them agree")
            rope[key], where[key] = value, name
    return rope


def read_drafting(raw, layers):
    """What only a draft has: its exits and how it drafts unless told otherwise."""
    exits = numbers(raw, "exit_layers", whole, high=1024)
    thresholds = numbers(raw, "thresholds", number, low=0.0, high=1.0)
    tree = numbers(raw, "draft_tree", whole, (10, 4, 60))
    if list(exits) != sorted(set(exits)) or exits and exits[-1] > layers:
        within = f"exits must increase and lie within the draft's {layers} layers"
        raise ValueError(f"exit_layers is {list(exits)}; {within}")
    if thresholds and len(thresholds) != len(exits):
        raise ValueError(f"{len(exits)} exit_layers cannot have {len(thresholds)} thresholds")
    if len(tree) != 3:
        raise ValueError(f"draft_tree is {list(tree)}; expected three numbers: top_k, depth, size")
    length, stop = whole(raw, "draft_length", 6), number(raw, "draft_stop", 0.0, 0.0, 1.0)
    return dict(zip(DRAFTING, (exits, thresholds, length, stop, tree)))


def eos_ids(raw, vocab_size):
    """The ids at which an answer ends: one, a list, or none (null)."""
    given = raw.get("eos_token_id", 2)
    if given == []:
        raise ValueError("eos_token_id is []; expected a token id, a list of them, or null")
    given = given if isinstance(given, list | None) else [given]
    return numbers({"eos_token_id": given}, "eos_token_id", whole, low=0, high=vocab_size - 1)


def config_to_dict(config, dtype):
    """DraftConfig -> config.json of weights in ``dtype``, as transformers 4 and 5 read it."""
    raw = LLAMA | asdict(config)
    factor, llama3, eos = (raw.pop(key) for key in ("rope_factor", "rope_llama3", "eos_token_ids"))
    if llama3:
        raw["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **dict(zip(LLAMA3, llama3))}
    elif factor != 1.0:
        raw["rope_scaling"] = {"type": "linear", "rope_type": "linear", "factor": factor}
    raw["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    return {key: raw[key] for key in raw if config.exit_layers or key not in DRAFTING}
