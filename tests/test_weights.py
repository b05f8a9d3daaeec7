"""Folders of Llamas: those of other people load, and those that will not load say why."""

import json
import os
import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import ROOT, SIZES, WEIGHTS, change_json, raises_line, random_llama
from safetensors.torch import load_file, save_file
from theirs import load_transformers
from transformers import LlamaForCausalLM
from vocabularies import save_trained

from s2d import Tokenizer, load_model
from s2d.checkpoint import load
from s2d.checkpoint.config import config_from_dict, read_folder
from s2d.checkpoint.load import check_device, choose_dtype
from s2d.checkpoint.save import save_model
from s2d.pair import names
from s2d.pair.loading import load_pair

refused = partial(raises_line, load_model)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    save_model(random_llama(0), tmp_path / "m", dtype=torch.float32)
    return tmp_path / "m"


@pytest.fixture
def sharded(folder, tmp_path):
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "s", max_shard_size="20KB")
    assert len(list((tmp_path / "s").glob("model-*.safetensors"))) > 2
    return tmp_path / "s"


def test_shards_and_pickled_shards_are_the_same_model(folder, sharded):
    """Pickled as Vicuna's, with the tables of old checkpoints."""
    expected = load_model(folder).state_dict()

    def check():
        loaded = load_model(sharded).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())

    check()
    index = (sharded / INDEX).read_text()
    (sharded / INDEX).unlink()
    (sharded / "pytorch_model.bin.index.json").write_text(index.replace(".safetensors", ".bin"))
    for file in sharded.glob("model-*.safetensors"):
        table = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        torch.save(load_file(file) | table, file.with_suffix(".bin"))
        file.unlink()
    check()


def test_a_pickle_is_not_run(folder, capsys):
    class Anything:
        def __reduce__(self):
            return print, ("this must not run",)

    (folder / "model.safetensors").unlink()
    for state in ({"lm_head.weight": Anything()}, {"step": 5}):
        torch.save(state, folder / "pytorch_model.bin")
        refused(ValueError, "pytorch_model.bin cannot be read", folder)
    assert not capsys.readouterr().out


def test_missing_files(folder, sharded):
    change_json(sharded / INDEX, weight_map={"lm_head.weight": 5})
    refused(ValueError, "has no weight_map", sharded)
    (folder / "model.safetensors").unlink()
    refused(FileNotFoundError, "no model.safetensors and no pytorch_model.bin", folder)
    (folder / "config.json").unlink()
    refused(FileNotFoundError, "config.json", folder)


def test_what_is_in_two_shards_and_what_may_not_be_read(folder, sharded, monkeypatch):
    """safetensors would say of the latter that there is no such file."""
    one, *_, last = sorted(sharded.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(one).items()))
    save_file(load_file(last) | {name: tensor + 1}, last)
    refused(ValueError, f"{last.name}: {name} differs from the one read before", sharded)
    read = read_folder(folder)
    monkeypatch.setattr(Path, "open", lambda *_, **__: os.close(-1))
    refused(ValueError, "model.safetensors cannot be read: .* Bad file descriptor", read)


def test_damage_of_any_kind_is_one_line(folder, sharded, tmp_path):
    """Files that are cut off, or have other bytes here and there: an error, or another model."""
    rng = random.Random(0)
    kinds = []
    (save_trained(folder) / "tokenizer_config.json").write_text('{"eos_token": "<|eot|>"}')
    files = [folder / "config.json", folder / "model.safetensors", sharded / INDEX]
    files += [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    for number in range(100):
        file, copy = files[number % 5], tmp_path / f"damaged-{number}"
        content = bytearray(file.read_bytes())
        for _ in range(rng.randrange(4)):
            content[rng.randrange(min(len(content), 3000))] = rng.randrange(256)
        if rng.random() < 0.3:
            content = content[: rng.randrange(len(content))]
        shutil.copytree(file.parent, copy)
        (copy / file.name).write_bytes(content)
        try:
            Tokenizer(copy) if file.name.startswith("tokenizer") else load_model(copy)
        except (ValueError, FileNotFoundError) as error:
            kinds.append(type(error))
            assert "\n" not in str(error) and str(copy) in str(error)
    assert kinds.count(ValueError) > 25


def test_tensors_that_do_not_fit(folder):
    """Quantised ones, too: cast to float they would load as noise."""
    file, name = folder / "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(file)
    weight = tensors.pop(name)
    for other, message in (
        ({}, f"has no tensor {name}"),
        ({name: torch.zeros(3, 4)}, r"\(3, 4\) in torch.float32; expected \(48, 32\)"),
        ({name: weight.to(torch.float8_e4m3fn)}, "in torch.float8_e4m3fn; expected .* not quantis"),
        ({name: weight, f"{name}_scale": torch.ones(4)}, f"tensor '{name}_scale', which no such"),
        ({name: weight, "model.layers.1.q_norm.weight": torch.ones(4)}, "q_norm.weight', which no"),
        ({name: weight, "model.norm.bias": torch.ones(4)}, "'model.norm.bias', which no such"),
    ):
        save_file(tensors | other, file)
        refused(ValueError, message, folder)


LLAMA3 = dict(type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
REFUSED = [
    (dict(model_type="gemma"), "model_type is 'gemma'; only llama, mistral, qwen2, qwen3 are"),
    (dict(architectures=["LlamaBiModel"]), "architectures has 'LlamaBiModel'; only"),
    (dict(quantization_config={"quant_method": "x"}), "quantization_config is .*; only None"),
    (dict(model_type="qwen2"), "architectures has 'LlamaForCausalLM'; only Qwen2ForCausalLM"),
    (dict(model_type="qwen3", architectures=...), "has no tensor model.layers.0.self_attn.k_norm"),
    (dict(rope_scaling={"type": "yarn", "factor": 2.0}), "rope type 'yarn' is not supported"),
    (dict(num_key_value_heads=3), "4 attention heads must be a multiple of 3 key"),
    (dict(hidden_size="wide"), "hidden_size is 'wide'; expected a whole number"),
    (dict(num_hidden_layers=10**6), "num_hidden_layers: more than 1000 are not supported"),
    (dict(torch_dtype="int3"), "config.json: dtype is 'int3'; expected auto or one of float64"),
]


def test_configs_that_are_refused(folder):
    before = (folder / "config.json").read_text()
    for changes, message in REFUSED:
        change_json(folder / "config.json", **changes)
        refused(ValueError, message, folder)
        (folder / "config.json").write_text(before)


def test_windows_of_no_layer_and_biases_that_are_there_anyway():
    raw = SIZES | dict(num_attention_heads=4, model_type="qwen2")
    plain = config_from_dict(raw)
    assert plain.eos_token_ids == () and plain.bos_token_id is None  # no tokens of a Llama
    assert config_from_dict(raw | {"model_type": "qwen3", "head_dim": None}).head_dim == 128
    for more in (
        dict(attention_bias=True),
        dict(use_sliding_window=True, sliding_window=None),
        dict(use_sliding_window=True, sliding_window=16, layer_types=["full_attention"] * 4),
    ):
        assert config_from_dict(raw | more) == plain
    for more in (
        dict(use_sliding_window=True),
        dict(use_sliding_window=True, layer_types=["sliding_attention"] * 4),
        dict(model_type="mistral"),
        dict(model_type="mistral", sliding_window=4096),
    ):
        raises_line(config_from_dict, ValueError, "layers have a sliding window", raw | more)


def test_layers_that_are_left_out_are_not_read(sharded):
    """A draft of the first layers of a large model needs no memory for the others, and no files."""
    whole = load_model(sharded).state_dict()
    (sharded / "model-00007-of-00008.safetensors").unlink()
    model = load_model(sharded, layers=2)
    assert len(model.model.layers) == model.config.num_hidden_layers == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole[name])
    refused(ValueError, "00007-of-00008.safetensors cannot be read", sharded)


def test_a_dtype_that_is_not_fast_is_only_used_if_it_is_asked_for(monkeypatch):
    """A GPU without bfloat16, such as a T4, computes in float16."""
    gpu = torch.device("cuda", 0)
    for capability, expected in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        assert choose_dtype("auto", gpu, "bfloat16") == expected
        assert choose_dtype("bfloat16", gpu, "float32") == torch.bfloat16
    assert choose_dtype("auto", torch.device("cpu"), "float64") == torch.float64
    assert choose_dtype("auto", torch.device("mps"), "float64") == torch.float32


def equals_transformers(folder):
    """The model in a folder, whose logits are those of transformers."""
    tokens, model = torch.arange(40)[None] % 61, load_model(folder, dtype="float64")
    with torch.inference_mode():
        expected = load_transformers(folder, torch.float64)(tokens).logits
        assert (model(tokens) - expected).abs().max() < 1e-10 * expected.abs().max()
    return model


@pytest.mark.parametrize("stored", ["both", "embedding", "head"])
def test_a_tied_model(folder, tmp_path, stored):
    """Two different tensors, as of merged adapters, are refused."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    shared = tensors.pop("model.embed_tokens.weight")
    written = dict(tensors)
    if stored != "embedding":
        written["lm_head.weight"] = shared
    if stored != "head":
        written["model.embed_tokens.weight"] = shared.clone()
    save_file(written, file, {"format": "pt"})
    change_json(folder / "config.json", tie_word_embeddings=True)
    model = equals_transformers(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_model(model, tmp_path / "saved", dtype=torch.float64)
    equals_transformers(tmp_path / "saved")
    save_file(tensors | {"lm_head.weight": head, "model.embed_tokens.weight": shared}, file)
    refused(ValueError, "differs from the one read before; tie_word_embeddings is True", folder)


def test_what_changes_no_llama_is_ignored(folder, capsys):
    """Such as tables of the rotary embedding; but a tensor that is missing is not made up."""
    file, layer = folder / "model.safetensors", "model.layers.1.self_attn.rotary_emb"
    tensors = load_file(file)
    more = {f"{layer}.{name}": torch.ones(4) for name in ("inv_freq", "cos_cached")}
    more |= {"v_head.bias": torch.ones(1), "model.layers.4.mlp.up_proj.weight": torch.ones(4)}
    save_file(tensors | more, file, {"format": "pt"})
    change_json(folder / "config.json", made_by="x", architectures=["LLaMAForCausalLM"])
    load_model(folder)
    assert not capsys.readouterr().err
    for layers in (4, 2):
        change_json(folder / "config.json", num_hidden_layers=layers)
        equals_transformers(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    refused(ValueError, "has no tensor model.layers.1.mlp.up_proj.weight", folder)


def test_the_original_context_may_stand_outside_of_the_rope(folder):
    for inside in ({}, {"original_max_position_embeddings": 16}):
        rope = LLAMA3 | inside
        change_json(folder / "config.json", rope_scaling=rope, original_max_position_embeddings=32)
        equals_transformers(folder)


def test_where_an_answer_ends(folder):
    """As config.json says or, before it, generation_config.json; without it Llama 3 never stops."""

    def ends(**generation):
        (folder / "generation_config.json").write_text(json.dumps(generation))
        return load_model(folder).config.eos_token_ids

    assert ends() == ends(eos_token_id=None) == ends(temperature=1.0) == (2,)
    assert ends(eos_token_id=[7, 2]) == (7, 2) and ends(eos_token_id=5) == (5,)
    assert ends(eos_token_id=[61, -1, 7]) == (7,)  # the others are the ids of no token
    file = folder / "generation_config.json"
    for content in ('{"do_sample": true.\n"eos_token_id": 7}', "", "[7]"):
        file.write_text(content)
        refused(ValueError, "json", folder)
    for wrong in ("7", True, [7, 2.0]):
        file.write_text(json.dumps({"eos_token_id": wrong}))
        refused(ValueError, "generation_config.json: eos_token_id is .* expected a token's", folder)
    file.write_text("{}")
    change_json(folder / "config.json", eos_token_id=None)
    assert ends() == () and ends(eos_token_id=[7, 8]) == (7, 8)


def test_devices(monkeypatch):
    for wrong in ("cuda:128", "meta", "tpu"):
        raises_line(check_device, ValueError, f"no device '{wrong}' here; expected auto", wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device("auto") == check_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "99")  # of torchrun
    for name in ("auto", "cuda"):
        raises_line(check_device, ValueError, f"no device '{name}' here", name)


def test_dtypes(folder):
    refused(ValueError, "dtype: expected auto, float64, .*, not 'fp16'", folder, dtype="fp16")
    assert load_model(folder).dtype == torch.float32
    save_file(load_model(folder, dtype="float64").state_dict(), folder / "model.safetensors")
    for wanted in ("auto", ...):  # what config.json does not say, the weights do
        change_json(folder / "config.json", torch_dtype=wanted)
        assert load_model(folder).dtype == torch.float64


def test_a_gpu_is_taken_without_the_attention_of_cudnn(folder, monkeypatch):
    monkeypatch.setattr(load, "check_device", {"auto": torch.device("cuda")}.get)
    monkeypatch.setattr(load, "fill", fill := Mock())
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switch := Mock())
    load_model(folder)
    assert torch.device("cuda") in fill.call_args.args
    switch.assert_called_once_with(False)


def test_a_model_that_is_too_large_for_the_memory(folder):
    """It is refused before its weights are read."""
    change_json(folder / "config.json", intermediate_size=10**11)
    refused(MemoryError, f"{folder} needs .* GB for weights in float32, and the memory has", folder)


# The first load also imports what every load needs. VmHWM and not ru_maxrss: Linux starts the
# latter at the peak of the parent process.
LOAD = r"""
import re, sys
from s2d import load_model

def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024

load_model(sys.argv[1])
before = peak()
model = load_model(sys.argv[2], dtype="float32")
print(peak() - before)
"""


def test_loading_holds_one_shard_beside_the_model(folder, tmp_path):
    """Peak memory of a load from bfloat16 to float32: the model and little more, no second copy.

    Not of weights that are packed, either.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    model = random_llama(3, **sizes, head_dim=128).float()
    megabytes = sum(p.nbytes for p in model.parameters()) / 2**20
    save_model(model, tmp_path / "one")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "one", dtype="bfloat16")
    theirs.save_pretrained(tmp_path / "large", max_shard_size="6MB")
    del model, theirs
    command = [sys.executable, "-c", LOAD, folder, tmp_path / "large"]
    grown = float(subprocess.check_output(command, cwd=ROOT, text=True))
    assert megabytes > 40
    assert 0.9 * megabytes < grown < 1.4 * megabytes


def test_names_are_known_to_load_pair(monkeypatch):
    """And what is not here is answered with what would get it."""
    assert load_pair("70b", WEIGHTS / "mini-draft").folder.path == WEIGHTS / "mini-70b"
    hub = "from the Hugging Face hub: hf download"
    monkeypatch.setattr(names, "WEIGHTS", WEIGHTS / "nowhere")
    for name, command in (
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B --local-dir weights/qwen3-0.6b"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct --local-dir weights/smollm2-135m"),
    ):
        message = f"no model folder at {name}; {hub} {command}$"
        raises_line(load_pair, FileNotFoundError, message, name)
    for name in ("7b", "weights/nowhere", "/a/b/c"):
        message = f"no model folder at {name}; the names are 7b, 13b, 70b, smollm2-135m$"
        raises_line(load_pair, FileNotFoundError, message, name)
