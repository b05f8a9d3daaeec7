"""Weights laid out anew for matmuls of a few rows: the same values; what is chosen, and refused."""

import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import raises_line, random_llama, random_tokens

from s2d.checkpoint import placement, save_model
from s2d.speed import layout
from s2d.speed.layout import LAYOUTS, ROWS, PackedLinear, quicken, usable_layouts

TOKENS = torch.tensor([random_tokens(0, 9)])
close = torch.testing.assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_is_within_what_rounding_allows(dtype):
    """In whatever order a kernel sums. A wrong layout is off by the size of a result."""
    torch.manual_seed(0)
    size = 160
    weight = torch.randn(96, size).to(dtype)
    for name in usable_layouts(dtype):
        convert, multiply = LAYOUTS[name]
        for rows in (1, 2, 3, 16, 17):
            x = torch.randn(1, rows, size).to(dtype)
            found = multiply(x, convert(weight))
            assert found.shape == (1, rows, 96) and found.dtype == dtype
            truth = F.linear(x.double(), weight.double())
            # Higham, Accuracy and Stability of Numerical Algorithms, 3.1: sums are in float32, and
            # the result is rounded once more.
            summed = F.linear(x.double().abs(), weight.double().abs())
            allowed = size * torch.finfo(torch.float32).eps * summed
            allowed += torch.finfo(dtype).eps * truth.abs()
            assert ((found.double() - truth).abs() <= allowed).all()


def choose(monkeypatch, **ratios):
    """Have layouts take so many times as long as plain weights, for each of ROWS."""
    ratios["plain"] = [1.0] * len(ROWS)

    def timed(what, cases, measure):
        return {(name, rows): 0.5 * ratios[name][ROWS.index(rows)] for name, rows in cases}

    monkeypatch.setattr(layout, "SMALL", 1)
    monkeypatch.setattr(layout, "timed_once", timed)
    monkeypatch.setattr(layout, "usable_layouts", lambda dtype: list(ratios))


def test_the_fastest_layout_is_taken_that_is_nowhere_slower_than_plain(monkeypatch):
    weights = [torch.ones(2, 2)]
    for columns, packed, chosen in (
        ([0.9] * 5, [0.8] * 5, "packed"),
        ([0.9] * 5, [0.3, 0.3, 0.3, 0.3, 1.1], "columns"),
        ([1.02] * 5, [1.2, 0.5, 0.5, 0.5, 0.5], "plain"),
        ([0.95] * 5, [0.94] * 5, "plain"),  # may be noise
    ):
        choose(monkeypatch, columns=columns, packed=packed)
        assert layout.choose_layout(weights, list(LAYOUTS)) == chosen
        names = ["plain", "columns"]  # of a processor that cannot pack
        fastest = "columns" if columns[0] <= 0.9 else "plain"
        assert layout.choose_layout(weights, names) == fastest


def test_a_small_model_in_float32_is_laid_out_by_columns_and_not_timed(monkeypatch):
    monkeypatch.setattr(layout, "timed_once", None)
    assert quicken(random_llama(0).float()) == "columns"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_by_columns_stay_an_ordinary_model(tied, monkeypatch):
    choose(monkeypatch, columns=[0.9] * 5)
    plain = random_llama(0, tie_word_embeddings=tied)
    model = random_llama(0, tie_word_embeddings=tied)
    assert quicken(model) == "columns" and model.lm_head.weight.t().is_contiguous()
    close(model(TOKENS), plain(TOKENS))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    plain.load_state_dict(model.state_dict())
    model.requires_grad_()(TOKENS).sum().backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.skipif(
    "packed" not in usable_layouts(torch.float32), reason="PyTorch cannot pack weights here"
)
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_compute_the_same_and_are_not_for_saving_or_training(
    tied, monkeypatch, tmp_path
):
    choose(monkeypatch, packed=[0.9] * 5)
    plain = random_llama(0, tie_word_embeddings=tied).float()
    model = random_llama(0, tie_word_embeddings=tied).float()
    assert quicken(model) == "packed" and isinstance(model.lm_head, PackedLinear)
    for rows in (1, 9):
        close(model(TOKENS[:, :rows]), plain(TOKENS[:, :rows]), rtol=1e-4, atol=1e-4)
    line = "packed weights are for inference alone: load_model(.*quick=False)"
    raises_line(model.state_dict, ValueError, line)
    raises_line(lambda: save_model(model, tmp_path / "saved"), ValueError, line)
    assert not (tmp_path / "saved").exists()
    raises_line(lambda: model.requires_grad_()(TOKENS), ValueError, line)


@pytest.mark.skipif(
    "packed" not in usable_layouts(torch.float32), reason="PyTorch cannot pack weights here"
)
def test_a_tied_head_that_is_packed_counts_in_memory_and_not_as_parameters(monkeypatch):
    choose(monkeypatch, packed=[0.9] * 5)
    model = random_llama(0, tie_word_embeddings=True, vocab_size=300_000).float()
    assert placement(model) == "cpu, float32, 9.6 M parameters, 0.04 GB of weights"
    assert quicken(model) == "packed"
    assert placement(model) == "cpu, float32, 9.6 M parameters, 0.08 GB of weights"


@pytest.mark.skipif(
    "packed" not in usable_layouts(torch.float32), reason="PyTorch cannot pack weights here"
)
def test_plain_weights_are_freed_one_after_another(monkeypatch):
    """In memory is one copy of the weights, but for those of a single attention or MLP."""
    choose(monkeypatch, packed=[0.9] * 5)
    model = random_llama(0).float()
    plain = [weakref.ref(weight) for weight in layout.linear_weights(model)]
    alive = []

    def pack(weight):
        alive.append(sum(each() is not None for each in plain))
        return packed(weight)

    packed = layout.pack
    monkeypatch.setattr(layout, "pack", pack)
    quicken(model)
    assert len(alive) == len(plain) and alive[0] == len(plain) and alive[-1] <= 3


def test_what_was_timed_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("s2d.timing.QUIET", 1e9)
    monkeypatch.setattr(layout, "SMALL", 1)
    model = random_llama(0).float()
    quicken(model)
    monkeypatch.setattr(layout, "time_layouts", None)  # is not called again
    quicken(random_llama(0).float())
    (seconds,) = json.loads((tmp_path / "s2d/costs.json").read_text()).values()
    assert len(seconds) == len(ROWS) * len(usable_layouts(torch.float32))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bias_is_kept(name):
    if name not in usable_layouts(torch.float32):
        return
    linear = torch.nn.Linear(32, 48)
    parent = torch.nn.Sequential(linear)
    x = torch.randn(1, 3, 32)
    expected = parent(x).detach()
    layout.lay_out(parent, "0", linear, name)
    with torch.inference_mode():
        close(parent(x), expected, rtol=1e-4, atol=1e-4)
