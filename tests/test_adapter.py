"""Low-rank adapters: PEFT reads what we write and adds up the same; what is not LoRA is refused."""

import json
import shutil
from functools import partial

import pytest
import torch
from helpers import WEIGHTS, change_json, contents, program, raises_line, random_llama, refuses
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from s2d import load_model
from s2d.train import __main__ as train
from s2d.train.lora import SCALE, adapter_pairs, add_adapters
from s2d.weights import save_adapter, save_model
from s2d.weights.__main__ import main
from s2d.weights.adapter import ADAPTER, TENSORS


@pytest.fixture
def folder(tmp_path):
    """base, a model of four layers, and draft, an adapter of its first three."""
    base = random_llama(1, vocab_size=1024)
    save_model(base, tmp_path / "base", WEIGHTS / "mini-7b", torch.float32)
    model = load_model(tmp_path / "base", num_layers=3, dtype="float32")
    add_adapters(model, 4, seed=0)
    for a, b in adapter_pairs(model).values():
        b.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(a.numel()))
    save_adapter(model, adapter_pairs(model), SCALE, tmp_path / "draft", tmp_path / "base")
    return tmp_path


TOKENS = torch.arange(20)[None] * 7 % 61


def load(folder, **how):
    return load_model(folder, dtype="float32", **how)


refused = partial(raises_line, load)


def same(logits, expected):
    return (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def peft_logits(base, adapter):
    """Of the first three layers of ``base``."""
    model = LlamaForCausalLM.from_pretrained(base, num_hidden_layers=3)
    return PeftModel.from_pretrained(model, adapter).eval()(TOKENS).logits


@torch.inference_mode()
def test_peft_adds_up_the_same(folder):
    expected = peft_logits(folder / "base", folder / "draft")
    assert same(load(folder / "draft")(TOKENS), expected)
    plain = load(folder / "base", num_layers=3)(TOKENS)
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()
    written = load_file(folder / "draft" / TENSORS)
    assert len(written) == 3 * 7 * 2
    config = json.loads((folder / "draft" / ADAPTER).read_text())
    assert config["base_model_name_or_path"] == "../base" and config["r"] == 4


@torch.inference_mode()
def test_what_learns_is_what_is_loaded(folder):
    """The model while it learns, with adapters beside the weights, is the folder, added up."""
    model = load(folder / "base", num_layers=3)
    add_adapters(model, 4, seed=0)
    assert sum(p.requires_grad for p in model.parameters()) == 3 * 7 * 2
    pairs = load_file(folder / "draft" / TENSORS)
    for name, pair in adapter_pairs(model).items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        for half, parameter in zip("AB", pair):
            parameter.copy_(pairs[f"{layer}.lora_{half}.weight"])
    assert same(model(TOKENS), load(folder / "draft")(TOKENS))


@torch.inference_mode()
def test_merged_it_is_an_ordinary_folder(folder, capsys):
    """``check`` says what each loads as: an adapter has no tokenizer, which a target needs."""
    assert program(main, "check", folder / "draft") == 0
    assert "draft will load as a draft (merged, as a target too): " in capsys.readouterr().out
    assert program(main, "merge", folder / "draft", folder / "merged") == 0
    refuses(main, capsys, "merged is there already", "merge", folder / "draft", folder / "merged")
    assert program(main, "merge", "--replace", folder / "draft", folder / "merged") == 0
    assert program(main, "check", folder / "merged") == 0
    assert "merged will load: 3 layers" in capsys.readouterr().out
    ours, merged = load(folder / "draft"), load(folder / "merged")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), merged.parameters()))
    assert ours.config == merged.config
    assert same(ours(TOKENS), LlamaForCausalLM.from_pretrained(folder / "merged")(TOKENS).logits)


MERGE, SOFT = ("merge", "{}/draft", "OUT"), ("soft", "--init", "{}/draft", "--out", "OUT")
TAUGHT = ("soft", "--init", "{}/merged", "--teacher", "{}/draft", "--out", "OUT")
TEXT = ("text", "--target", "{}/draft", "--from", "OUT", "--out", "OUT")


@pytest.mark.parametrize("name", ["draft", "base"])
@pytest.mark.parametrize(
    "words", [MERGE, SOFT, TAUGHT, TEXT], ids=["merge", "soft", "taught", "text"]
)
def test_what_is_read_is_never_what_is_written(words, name, folder, capsys):
    """Nor the base of an adapter, whatever it is called here."""
    (folder / "link").symlink_to(folder)
    before = contents(folder)
    out = [word.format(folder).replace("OUT", f"{folder}/link/{name}") for word in words]
    more = ["--layers", 3, "--exits", 3] * (words[0] == "soft")
    each = main if words[0] == "merge" else train.main
    refuses(each, capsys, "which is read", *out, *more, "--replace")
    assert contents(folder) == before


@pytest.mark.parametrize("beginning", [True, False, "gaussian", "orthogonal", "pissa", "olora"])
@torch.inference_mode()
def test_what_peft_writes(folder, beginning):
    """It adds up the same, or is refused where PEFT would change the base before it adds."""
    base = LlamaForCausalLM.from_pretrained(folder / "base", num_hidden_layers=3)
    sizes = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
    made = LoraConfig(**sizes, init_lora_weights=beginning, task_type="CAUSAL_LM")
    model = get_peft_model(base, made)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.05)
    model.save_pretrained(folder / "peft")
    shutil.copy(folder / "draft/config.json", folder / "peft")
    if beginning in ("pissa", "olora"):
        refused(ValueError, f"init_lora_weights is '{beginning}'; only True", folder / "peft")
    else:
        assert same(load(folder / "peft")(TOKENS), peft_logits(folder / "base", folder / "peft"))


def test_its_config_is_that_of_its_base(folder):
    """But for its layers and how it drafts."""
    file, other = folder / "base/config.json", "draft/config.json has .*base/config.json, which"
    config = json.loads(file.read_text())
    change_json(file, rms_norm_eps=config["rms_norm_eps"] * (1 + 1e-8))
    load(folder / "draft")
    for changes, message in (
        ({"rope_theta": 500.0}, other),
        ({"num_attention_heads": 2, "head_dim": 16}, other),
        ({"quantization_config": {}}, "base/config.json: it has a quantization_config"),
    ):
        file.write_text(json.dumps(config | changes))
        refused(ValueError, message, folder / "draft")


def test_what_is_no_adapter_of_ours(folder, capsys):
    draft = folder / "draft"
    config, tensors = draft / ADAPTER, draft / TENSORS
    good, weights = json.loads(config.read_text()), load_file(tensors)
    first = min(weights)

    for changes, message in (
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"alora_invocation_tokens": [1]}, "'alora_invocation_tokens' is not known here"),
        ({"layer_replication": [[0, 2]], "x": 0}, "'layer_replication, x' is not known here"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"r": 0}, "r is 0; expected a whole number"),
        ({"r": 8}, r"are \(4, .* but r and the model ask for \(8, "),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear'; expected a list"),
        ({"target_modules": ["q_proj"]}, "_proj, which is not among the target_modules"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3"),
    ):
        config.write_text(json.dumps(good | changes))
        refused(ValueError, message, draft)
    for base, message in (
        ("../smollm2-135m", "/smollm2-135m, .* with: python -m s2d.weights get smollm2-135m"),
        ("meta-llama/Llama-3.2-1B", "of meta-llama/Llama-3.2-1B, which is not there; bring it"),
    ):
        config.write_text(json.dumps(good | {"base_model_name_or_path": base}))
        refused(FileNotFoundError, message, draft)
    config.write_text(json.dumps(good))
    shutil.copy(config, folder / "base")
    refused(ValueError, "is an adapter of .*/base, which is one itself; merge that first", draft)
    (folder / "base" / ADAPTER).unlink()
    second, head = first.replace("lora_A", "lora_B"), "base_model.model.lm_head.weight"
    without = {name: tensor for name, tensor in weights.items() if name != second}
    bare = {name.removeprefix("base_model.model."): tensor for name, tensor in weights.items()}
    for changed, message in (
        (without, "fits no weight"),
        (bare, "fits no weight"),
        (weights | {first: weights[first][:, :5].contiguous()}, r"are \(4, 5\) and"),
        (weights | {first: weights[first][0].clone()}, r"are \(.*,\) and"),
        (weights | {first: weights[first].to(torch.int8)}, "is of dtype I8; quantised"),
        (weights | {head: torch.zeros(2)}, "lm_head.weight' fits no weight"),
        (weights | {first.replace("layers.0", "layers.7"): weights[first] + 0}, "fits no weight"),
    ):
        save_file(changed, tensors)
        refused(ValueError, message, draft)
    tensors.write_bytes(b"x" * 100)
    refused(ValueError, "adapter_model.safetensors is damaged", draft)
    tensors.unlink()
    refused(FileNotFoundError, "adapter_model.safetensors is missing", draft)
    (draft / "adapter_model.bin").touch()
    refused(ValueError, "adapter_model.bin is pickled, and only safetensors are read", draft)
    refuses(main, capsys, "is no adapter", "merge", folder / "base", folder / "m")
