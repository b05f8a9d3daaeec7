"""Low-rank adapters: PEFT reads what we write and adds up the same; what is not LoRA is refused."""

import json

import pytest
import torch
from helpers import random_llama
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from s2d import load_model
from s2d.train.lora import SCALE, adapter_pairs, add_adapters
from s2d.weights import save_adapter, save_model
from s2d.weights.__main__ import main


@pytest.fixture
def folder(tmp_path):
    """base, a model of four layers, and draft, an adapter of its first three."""
    save_model(random_llama(1), tmp_path / "base", dtype=torch.float32)
    model = load_model(tmp_path / "base", num_layers=3)
    add_adapters(model, 4, seed=0)
    for a, b in adapter_pairs(model).values():
        b.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(a.numel()))
    save_adapter(model, adapter_pairs(model), SCALE, tmp_path / "draft", tmp_path / "base")
    return tmp_path


def test_peft_adds_up_the_same(folder):
    tokens = torch.randint(0, 61, (1, 20))
    base = LlamaForCausalLM.from_pretrained(folder / "base", num_hidden_layers=3)
    theirs = PeftModel.from_pretrained(base, folder / "draft").eval()
    with torch.inference_mode():
        expected, ours = theirs(tokens).logits, load_model(folder / "draft")(tokens)
        plain = load_model(folder / "base", num_layers=3)(tokens)
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()
    names = set(load_file(folder / "draft/adapter_model.safetensors"))
    assert names == {
        name.replace(".default", "") for name, _ in theirs.named_parameters() if "lora_" in name
    }
    config = json.loads((folder / "draft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../base" and config["r"] == 4


def test_what_learns_is_what_is_loaded(folder):
    """The model while it learns, with its adapters beside the weights, and the folder, with them added up."""
    model, tokens = load_model(folder / "base", num_layers=3), torch.randint(0, 61, (1, 20))
    add_adapters(model, 4, seed=0)
    assert sum(p.requires_grad for p in model.parameters()) == 3 * 7 * 2
    pairs = load_file(folder / "draft/adapter_model.safetensors")
    for name, (a, b) in adapter_pairs(model).items():
        a.copy_(pairs[f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"])
        b.copy_(pairs[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"])
    with torch.inference_mode():
        assert torch.allclose(
            model(tokens), load_model(folder / "draft")(tokens), rtol=1e-4, atol=1e-5
        )


def test_merged_it_is_an_ordinary_folder(folder):
    assert main(["merge", str(folder / "draft"), str(folder / "merged")]) == 0
    ours, merged = load_model(folder / "draft"), load_model(folder / "merged")
    assert (
        all(torch.equal(a, b) for a, b in zip(ours.parameters(), merged.parameters()))
        and ours.config == merged.config
    )
    tokens = torch.randint(0, 61, (1, 20))
    with torch.inference_mode():
        theirs = LlamaForCausalLM.from_pretrained(folder / "merged")(tokens).logits
        assert (theirs - ours(tokens)).abs().max() < 1e-4 * theirs.abs().max()


def test_what_is_no_adapter_of_ours(folder, capsys):
    config, tensors = (
        folder / "draft/adapter_config.json",
        folder / "draft/adapter_model.safetensors",
    )
    good, weights = json.loads(config.read_text()), load_file(tensors)
    first = min(weights)

    def refused(error, message):
        with pytest.raises(error, match=message) as caught:
            load_model(folder / "draft")
        assert "\n" not in str(caught.value)

    for changes, message in (
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"), ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"), ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"r": 0}, "r is 0; expected a whole number"), ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3"),
    ):  # fmt: skip
        config.write_text(json.dumps(good | changes))
        refused(ValueError, message)
    config.write_text(json.dumps(good | {"base_model_name_or_path": "../smollm2-135m"}))
    refused(
        FileNotFoundError,
        "is an adapter of .*smollm2-135m, which is not there; get it with: python -m s2d.weights get smollm2-135m",
    )
    config.write_text(json.dumps(good))
    for changed, message in (
        (
            {
                name: tensor
                for name, tensor in weights.items()
                if name != first.replace("lora_A", "lora_B")
            },
            "fits no weight",
        ),
        (weights | {first: weights[first][:, :5].contiguous()}, "fits no weight"),
        (
            weights | {"base_model.model.lm_head.weight": torch.zeros(2)},
            "which is no part of an adapter",
        ),
        (
            weights | {first.replace("layers.0", "layers.7"): weights[first].clone()},
            "fits no weight",
        ),
    ):
        save_file(changed, tensors)
        refused(ValueError, message)
    tensors.write_bytes(b"x" * 100)
    refused(ValueError, "missing or damaged")
    tensors.unlink()
    refused(ValueError, "missing or damaged")
    assert main(["merge", str(folder / "base"), str(folder / "m")]) == 2
    assert "is no adapter" in capsys.readouterr().err
