"""Faults that were found in folders of public models, and what is refused, in one line."""

from helpers import WEIGHTS, raises_line, random_llama

from s2d.checkpoint.config import config_from_dict
from s2d.checkpoint.load import save_model
from s2d.pair import names
from s2d.pair.loading import choose_pair, load_pair

RAW = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
RAW |= dict(num_attention_heads=4, max_position_embeddings=64, model_type="qwen2")


def test_windows_of_no_layer_and_biases_that_are_there_anyway():
    plain = config_from_dict(RAW)
    assert plain.eos_token_ids == () and plain.bos_token_id is None  # no tokens of a Llama
    assert config_from_dict(RAW | {"model_type": "qwen3"}).head_dim == 128
    for more in (
        dict(attention_bias=True),
        dict(use_sliding_window=True, sliding_window=None),
        dict(use_sliding_window=True, sliding_window=16, layer_types=["full_attention"] * 4),
    ):
        assert config_from_dict(RAW | more) == plain
    switched_on = RAW | {"use_sliding_window": True}
    of_mistral = RAW | {"model_type": "mistral"}
    for raw in (
        switched_on,
        switched_on | dict(layer_types=["sliding_attention"] * 4),
        of_mistral,
        of_mistral | dict(sliding_window=4096),
    ):
        raises_line(config_from_dict, ValueError, "some layers have a sliding window", raw)


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


def test_a_draft_has_the_vocabulary_of_its_target(tmp_path):
    """But for padding."""
    save_model(random_llama(0, vocab_size=1024 + 176), tmp_path / "draft")
    raises_line(choose_pair, ValueError, "not have 1200 and 1024", "7b", tmp_path / "draft")
