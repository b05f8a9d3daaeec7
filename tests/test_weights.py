"""Folders that will not load say why, and nothing is ever half-written."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from helpers import LLAMA_2, change_json, peak_growth, raises_line, random_llama
from safetensors.torch import load_file, save_file
from theirs import load_transformers
from transformers import GenerationConfig, LlamaForCausalLM

from s2d import load_model, weights
from s2d.weights import save_model
from s2d.weights.config import config_from_dict, read_config, unread_settings

refused = partial(raises_line, load_model)


@pytest.fixture
def folder(tmp_path):
    save_model(random_llama(0), tmp_path / "m", dtype=torch.float32)
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path):
    save_model(random_llama(0), tmp_path / "s", dtype=torch.float32, max_shard_bytes=20000)
    assert len(list((tmp_path / "s").glob("model-*.safetensors"))) > 2
    return tmp_path / "s"


def holds(folder, state):
    """Whether the folder's model has these weights."""
    return all(torch.equal(state[name], p) for name, p in load_model(folder).state_dict().items())


def test_missing_files(tmp_path, folder, sharded):
    refused(FileNotFoundError, "no model folder at", tmp_path / "nowhere")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    refused(FileNotFoundError, "neither model.safetensors nor", folder)
    (folder / "config.json").unlink()
    refused(FileNotFoundError, "config.json is missing", folder)
    second = sorted(sharded.glob("model-*.safetensors"))[1]
    second.unlink()
    refused(FileNotFoundError, f"{second.name} is missing", sharded)


def test_damaged_files(folder, sharded):
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 2000):
        (folder / "model.safetensors").write_bytes(damaged)
        refused(ValueError, "is damaged", folder)
    for content, message in ((b"{x", "valid"), (b"\xff\xfe\0", "valid"), (b"[]", "list, no")):
        (folder / "config.json").write_bytes(content)
        refused(ValueError, f"{message} JSON", folder)
    (folder / "config.json").write_text('{"head_dim": 8, "rope_scaling": {"type": 1, "type": 2}}')
    refused(ValueError, r"config.json is not valid JSON \('type' is there twice\)", folder)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    refused(ValueError, "has no tensor model.embed_tokens.weight", sharded)


def test_wrong_tensors(folder):
    """Quantised ones, too: cast to float they would load as noise."""
    file, name = folder / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(file)
    weight = tensors.pop(name)
    for other, message in (
        ({}, f"has no tensor {name}"),
        ({name: torch.zeros(3, 4)}, rf"{name} has shape \(3, 4\), .* asks for \(48, 32\)"),
        ({name: weight.to(torch.float8_e4m3fn)}, f"{name} is of dtype F8_E4M3; quantised"),
        ({name: weight.to(torch.int8)}, f"{name} is of dtype I8; quantised weights"),
    ):
        save_file(tensors | other, file)
        refused(ValueError, message, folder)


BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
WITHOUT_CONTEXT = {"rope_type": "llama3", "factor": 8.0} | BANDS
LLAMA_3_ROPE = WITHOUT_CONTEXT | {"original_max_position_embeddings": 8192}
DEFAULT, LINEAR = {"rope_type": "default"}, {"type": "linear", "factor": 2.0}
REFUSED = [
    (dict(model_type="mistral"), "model_type is 'mistral'"),
    (dict(quantization_config={"quant_method": "x"}), "it has a quantization_config"),
    (dict(rope_scaling=LINEAR | {"type": "yarn"}), "rope type 'yarn' is not supported"),
    (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "has no 'low_freq_factor'"),
    (dict(rope_scaling=LLAMA_3_ROPE | {"low_freq_factor": 4}), "must be below"),
    (dict(rope_scaling={"type": "linear"}), "has no 'factor'"),
    (dict(rope_scaling=-0.5), "rope_scaling is -0.5; expected an object or null"),
    (dict(rope_scaling=LINEAR | {"attention_factor": 2.0}), "'attention_factor' is not known"),
    (dict(rope_scaling=LINEAR | {"rope_type": "llama3"}), "llama3. in rope_s.*, but .linear"),
    (dict(rope_parameters=DEFAULT, rope_scaling=LINEAR), "default. in rope_p.*, but .linear"),
    (dict(rope_theta=5.0, rope_parameters=DEFAULT | {"rope_theta": 6.0}), "6.0 in r.*5.0 in c"),
    (dict(rope_scaling=LLAMA_3_ROPE, original_max_position_embeddings=6), "8192 in r.*6 in c"),
    (dict(rope_theta=float("nan")), "rope_theta is nan; expected a number"),
    (dict(rope_interleaved=True), "rope_interleaved is True; only False"),
    (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    (dict(attention_bias=True), "attention_bias is True"),
    (dict(architectures=["LlamaBiModel"]), "architectures is .'LlamaBiModel'.; only"),
    (dict(logit_scale=0.1, qk_norm=True), "'logit_scale, qk_norm' is not known here"),
    (dict(num_key_value_heads=3), "cannot share 3 key/value heads"),
    (dict(hidden_size=...), "has no 'hidden_size'"),
    (dict(hidden_size="wide"), "hidden_size is 'wide'; expected a whole number"),
    (dict(head_dim="x"), "head_dim is 'x'; expected a whole number"),
    (dict(head_dim=7), "needs an even number"),
    (dict(eos_token_id={"a": 1}), "eos_token_id is {'a': 1}; expected a whole number within 0..60"),
    (dict(eos_token_id=[]), "eos_token_id is ..; expected a token id, a list of them, or null"),
    (dict(eos_token_id=61), "eos_token_id is 61; expected a whole number within 0..60"),
    (dict(tie_word_embeddings=1), "tie_word_embeddings is 1; expected true or false"),
    (dict(exit_layers=[2, 3, 4], thresholds=[0.5, 0.0]), "3 exit_layers cannot have 2 thresholds"),
    (dict(exit_layers=[2, 9]), "2, 9.; exits must increase and lie within the draft's 4 layers"),
    (dict(exit_layers="1,2"), "exit_layers is '1,2'; expected a list of numbers"),
    (dict(exit_layers=[2], draft_stop=1.5), "draft_stop is 1.5; expected a number within 0..1"),
    (dict(exit_layers=[2], draft_tree=[4, 2]), "draft_tree is .4, 2.; expected three numbers"),
    (dict(draft_length="6"), "draft_length is '6'; expected a whole number"),
]


def test_configs_that_are_refused(folder):
    before = (folder / "config.json").read_text()
    for changes, message in REFUSED:
        change_json(folder / "config.json", **changes)
        refused(ValueError, message, folder)
        (folder / "config.json").write_text(before)
    twice = {"rope_parameters": LINEAR, "rope_scaling": LINEAR}
    inside = {"rope_theta": ..., "rope_parameters": DEFAULT | {"rope_theta": 5000.0}}
    outside = {"rope_scaling": WITHOUT_CONTEXT, "original_max_position_embeddings": 16}
    for changes in (twice | {"logit_scale": None}, inside, outside):  # these are not
        change_json(folder / "config.json", **changes)
        agrees_with_transformers(folder)
        (folder / "config.json").write_text(before)
    assert config_from_dict(json.loads(before) | outside).rope_llama3 == (1.0, 4.0, 16)


@pytest.mark.parametrize("sizes", [20_000, 2**30])
def test_tensors_that_nobody_claims_are_refused(tmp_path, sizes):
    """But the rotary embedding's frequencies, and layers that are not asked for."""
    model = random_llama(0)
    tensors = {name: p.float() for name, p in model.named_parameters()}
    for extra, known in (
        ("model.layers.1.self_attn.rotary_emb.inv_freq", True),
        ("model.rotary_emb.inv_freq", True),
        ("model.layers.1.self_attn.q_proj.weight_scale", False),
        ("model.layers.1.self_attn.q_norm.weight", False),
        ("model.layers.4.mlp.up_proj.weight", False),
        ("lm_head.bias", False),
    ):
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        (tmp_path / "m").mkdir()
        weights.write_config(model, tmp_path / "m", torch.float32)
        every = tensors | {extra: torch.ones(4)}
        weights.write_shards(weights.split(every, sizes), tmp_path / "m")
        if known:
            assert load_model(tmp_path / "m", num_layers=2).config.num_hidden_layers == 2
        else:
            refused(ValueError, f"has the tensor '{extra}', which is none of", tmp_path / "m")


REAL = {
    "Vicuna 1.5": LLAMA_2 | {"pad_token_id": 0, "max_sequence_length": 2048},
    "Vicuna 16k": LLAMA_2 | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Llama 3.1": LLAMA_2
    | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "head_dim": 128}
    | {"rope_theta": 500000.0, "eos_token_id": [2, 8, 9], "max_position_embeddings": 131072}
    | {"rope_scaling": LLAMA_3_ROPE},
    "SmolLM2": LLAMA_2
    | {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True}
    | {"transformers.js_config": {"dtype": "q4"}, "rope_theta": 100000, "pad_token_id": 2},
}


@pytest.mark.parametrize("name", REAL)
def test_configs_of_real_models(name):
    assert config_from_dict(REAL[name]).hidden_size == 4096


def agrees_with_transformers(folder):
    tokens = torch.arange(40)[None] % 61
    with torch.inference_mode():
        expected = load_transformers(folder, torch.float64)(tokens).logits
        ours = load_model(folder, dtype="float64")(tokens)
    assert (ours - expected).abs().max() < 1e-6 * expected.abs().max()


def test_one_file_is_preferred_to_an_index_of_files_that_are_gone(folder, sharded):
    index = (sharded / "model.safetensors.index.json").read_text()
    (folder / "model.safetensors.index.json").write_text(index)
    agrees_with_transformers(folder)
    shard = sorted(sharded.glob("model-*"))[0]
    (folder / shard.name).write_bytes(shard.read_bytes())
    refused(ValueError, f"has both model.safetensors and .* with {shard.name}; remove", folder)


def test_a_config_that_is_known_is_not_read_again(folder):
    config = read_config(folder)
    (folder / "config.json").unlink()
    assert load_model(folder, dtype="float32", config=config).config is config


def test_one_tensor_in_two_shards(sharded):
    first, second = sorted(sharded.glob("model-*"))[:2]
    twice = next(iter(load_file(first).items()))
    save_file(load_file(second) | dict([twice]), second)
    refused(ValueError, f"{twice[0]}' is in {second.name}, but {first.name} in", sharded)


def test_an_lm_head_that_is_tied_but_not_the_embedding(tmp_path):
    save_model(random_llama(0, tie_word_embeddings=True), tmp_path / "m", dtype=torch.float32)
    file = tmp_path / "m/model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, file)
    agrees_with_transformers(tmp_path / "m")
    head[60, 31] += 1
    for other in (head, head[:60].clone(), head.bfloat16()):
        save_file(tensors | {"lm_head.weight": other}, file)
        refused(ValueError, "has an lm_head.weight that is not .*tie_word_embed", tmp_path / "m")


def test_where_an_answer_ends(folder):
    """As config.json says or, before it, generation_config.json; and the tokenizer's end."""

    def ends(generation=None, tokenizer=None):
        (folder / "generation_config.json").write_text(json.dumps(generation or {}))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))
        return load_model(folder).config.eos_token_ids

    by_id = {"5": {"content": "<|eot|>"}, "9": {"content": "x"}, "700": {"content": "far"}}
    added = {"added_tokens_decoder": by_id}
    assert ends() == (2,)
    assert ends({"temperature": 1.0}) == (2,) and ends({"eos_token_id": None}) == (2,)
    assert ends({"eos_token_id": [7, 2]}) == (7, 2)
    assert ends(tokenizer=added | {"eos_token": "<|eot|>"}) == (2, 5)
    assert ends({"eos_token_id": [5, 7]}, added | {"eos_token": {"content": "<|eot|>"}}) == (5, 7)
    assert ends(tokenizer=added) == ends(tokenizer=added | {"eos_token": "far"}) == (2,)
    for eos, message in (
        (61, "generation_config.json: eos_token_id is 61"),
        ([7, 8], r"eos_token_id is \[2\] in config.json, but \[7, 8\] in generation_config.json"),
    ):
        raises_line(ends, ValueError, message, {"eos_token_id": eos})
    change_json(folder / "config.json", eos_token_id=...)
    assert ends({"eos_token_id": [7, 8]}) == (7, 8)


CHANGING = """bad_words_ids begin_suppress_tokens constraints dola_layers force_words_ids
encoder_no_repeat_ngram_size encoder_repetition_penalty exponential_decay_length_penalty
forced_bos_token_id forced_eos_token_id guidance_scale max_time min_length min_new_tokens
no_repeat_ngram_size num_beams penalty_alpha repetition_penalty sequence_bias stop_strings
suppress_tokens token_healing watermarking_config x"""


def test_settings_that_change_greedy_text_are_told(folder):
    """All that transformers knows, set to a number or as it is by itself; config.json's as well."""
    every = GenerationConfig().to_dict() | {"temperature": 0.6, "suppress_tokens": []}
    neutral = every | GenerationConfig._get_default_generation_params()
    config, file = folder / "config.json", folder / "generation_config.json"
    file.write_text(json.dumps(neutral))
    assert unread_settings(folder) is None
    file.write_text(json.dumps(dict.fromkeys([*every, "x"], 3)))
    told = re.fullmatch(
        f"{file} sets (.*), which transformers applies and .*", unread_settings(folder)
    )
    assert set(told[1].split(", ")) == {f"{name} 3" for name in CHANGING.split()}
    file.unlink()
    change_json(config, repetition_penalty=1.2, top_k=3, num_beams=1, no_repeat_ngram_size=0)
    assert f"{config} sets repetition_penalty 1.2, which" in unread_settings(folder)
    assert LlamaForCausalLM.from_pretrained(folder).generation_config.repetition_penalty == 1.2


def test_devices_and_dtypes(folder, monkeypatch):
    for count, name in ((0, "cpu"), (1, "cuda"), (8, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert weights.check_device("auto") == torch.device(name)
    monkeypatch.setenv("LOCAL_RANK", "7")
    for name, own in (("auto", "cuda:7"), ("cuda:1", "cuda:7"), ("cpu", "cpu")):
        assert weights.own_device(name) == torch.device(own)
    monkeypatch.setenv("LOCAL_RANK", "8")
    raises_line(weights.own_device, ValueError, "'cuda:8' was asked .* sees 8 GPUs", "cuda")
    monkeypatch.undo()
    model = load_model(folder, dtype="float64")
    size = sum(p.nbytes for p in model.parameters()) / 1e9
    expected = f"cpu, {torch.get_num_threads()} threads, float64, {size:.2f} GB of weights"
    assert weights.placement(model) == expected
    assert weights.placement(model, model).endswith(f", float64, {2 * size:.2f} GB of weights")
    refused(ValueError, "unknown dtype 'float8'", folder, dtype="float8")
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype="bfloat16").rope_cos.dtype == torch.bfloat16


def test_first_layers_only(folder):
    full, cut = load_model(folder), load_model(folder, num_layers=2)
    tokens = torch.arange(20)[None]
    assert torch.equal(cut(tokens), full.logits(full.run_layers(full.embed(tokens), 0, 2)))
    refused(ValueError, "cannot keep the first 5 of 4 layers", folder, num_layers=5)


def test_an_index_names_files_of_its_own_folder(sharded, folder):
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    there = str(folder / "model.safetensors")
    for outside in ("../m/model.safetensors", there, "..", ".", "", "a\nb", None, 3):
        change_json(index, weight_map=names | {"lm_head.weight": outside})
        refused(ValueError, "is no name of a file in this folder", sharded)
    for wrong in (None, 3, [], "x"):
        change_json(index, weight_map=wrong)
        refused(ValueError, "weight_map is no object", sharded)


def test_loading_holds_one_shard_beside_the_model(folder, tmp_path):
    """Peak memory of a load from bf16 to float32: the model and little more, not a second copy."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24}
    model = random_llama(3, **sizes, head_dim=128).float()
    megabytes = sum(p.nbytes for p in model.parameters()) / 2**20
    save_model(model, tmp_path / "large", max_shard_bytes=16 * 2**20)
    del model
    # The first load also imports what every load needs.
    prepare = "from s2d import load_model; load_model(sys.argv[1])"
    few = "; from s2d.extras import products; products.BYTES = 1e6"  # of weights to time ways with
    load = "m = load_model(sys.argv[2], dtype='float32')"
    grown = peak_growth(prepare + few, load, folder, tmp_path / "large")
    assert megabytes > 200
    assert 0.9 * megabytes < grown < 1.4 * megabytes


def test_a_share_of_every_tensor(sharded):
    """What one process of several reads: slices, of which shapes are still checked whole."""
    whole = load_model(sharded).state_dict()
    halves = load_model(sharded, share=lambda name, shape: (slice(0, shape[0] // 2), ...))
    for name, parameter in halves.named_parameters():
        assert torch.equal(parameter, whole[name][: len(whole[name]) // 2])
    change_json(sharded / "config.json", vocab_size=50)
    refused(ValueError, "config.json asks for", sharded, share=lambda *_: (slice(0, 1), ...))
