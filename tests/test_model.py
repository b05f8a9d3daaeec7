"""Our Llama against transformers' own, and both directions of the checkpoint format."""

import pytest
import torch
from full_size import SHAPES
from helpers import random_llama
from theirs import load_transformers, random_transformers

from s2d import load_model
from s2d.checkpoint.load import empty_model
from s2d.checkpoint.save import save_model
from s2d.model import LlamaConfig

LLAMA3 = dict(rope_type="llama3", factor=7.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64, rope_theta=5000.0)
VARIANTS = {
    "plain": dict(num_key_value_heads=4),
    "one-kv-head": dict(num_key_value_heads=1, tie_word_embeddings=True),
    "wide-heads": dict(head_dim=16),
    "linear-rope": dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=5000.0)),
    "llama3-rope": dict(rope_parameters=LLAMA3),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, sliding_window=32),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "mistral": dict(model_type="mistral", sliding_window=None, head_dim=16),
}
SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=3)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
SIZES |= dict(eos_token_id=96, initializer_range=0.3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, tmp_path):
    random_transformers(**SIZES | VARIANTS[variant]).save_pretrained(tmp_path)
    tokens = torch.randint(0, 97, (2, 50), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        theirs = load_transformers(tmp_path, torch.float64)(tokens).logits
        ours = load_model(tmp_path, dtype="float64")(tokens)
    assert theirs.abs().max() > 1.0  # the comparison would be empty on near-zero logits
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


PUBLISHED = {"7b": 6_738_415_616, "13b": 13_015_864_320, "70b": 68_976_648_192}


@pytest.mark.parametrize("shape", PUBLISHED)
def test_models_have_the_published_sizes(shape):
    """Of Llama 2, and of Vicuna 7B and 13B."""
    model = empty_model(LlamaConfig(*SHAPES[shape]))
    assert sum(each.numel() for each in model.parameters()) == PUBLISHED[shape]


OURS = [
    dict(rope_factor=8.0, rope_llama3=(1.0, 4.0, 64), eos_token_ids=(2, 7)),
    dict(rope_factor=2.5),
    dict(exits=(1, 4), thresholds=(0.7, 0.0), stop=0.3, growing=(3, 5, 8)),
    dict(qkv_bias=True),
    dict(qk_norm=True, head_dim=16, tie_word_embeddings=True),
]


@pytest.mark.parametrize("changes", OURS)
def test_a_model_that_is_saved_loads_in_transformers(tmp_path, changes):
    """Its config.json is as transformers 4 writes it."""
    model = random_llama(3, **changes)
    save_model(model, tmp_path / "m", dtype=torch.float64)
    tokens = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        theirs = load_transformers(tmp_path / "m", torch.float64)(tokens).logits
        assert (model(tokens) - theirs).abs().max() < 1e-10 * theirs.abs().max()
    loaded = load_model(tmp_path / "m", dtype="float64")
    assert (loaded.config, loaded.drafting) == (model.config, model.drafting)
