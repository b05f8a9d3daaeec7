"""Weights laid out anew for matmuls of a few rows: the same values; what is chosen, and refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import raises_line, random_llama, random_tokens

from s2d.checkpoint import layout
from s2d.checkpoint.layout import PackedLinear, can_pack, multiply_packed, pack, quicken
from s2d.checkpoint.save import save_model

TOKENS = torch.tensor([random_tokens(0, 9)])
by_columns = lambda weight: weight.t().contiguous().t()  # noqa: E731
LAYOUTS = {"columns": (by_columns, F.linear)}
if can_pack(torch.float32):
    LAYOUTS["packed"] = pack, multiply_packed
close = torch.testing.assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_is_within_what_rounding_allows(dtype):
    """Sums are in float32, and the result is rounded once more."""
    torch.manual_seed(0)
    weight = torch.randn(96, 160).to(dtype)
    layouts = dict(LAYOUTS) if can_pack(dtype) else {"columns": LAYOUTS["columns"]}
    for convert, multiply in layouts.values():
        for rows in (1, 2, 3, 16, 17):
            x = torch.randn(1, rows, 160).to(dtype)
            found = multiply(x, convert(weight))
            assert found.dtype == dtype
            expected = F.linear(x.double(), weight.double())
            close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_the_rule(monkeypatch):
    """A small model in float32 by columns; others packed, if this processor can; or plain."""
    assert quicken(random_llama(0).float()) == "columns"
    for can in (True, False):
        monkeypatch.setattr(layout, "can_pack", lambda dtype, can=can: can)
        monkeypatch.setattr(layout, "pack", by_columns)
        assert quicken(random_llama(0).double()) == ("packed" if can else "plain")
        with monkeypatch.context() as patch:
            patch.setattr(layout, "SMALL", 1)
            assert quicken(random_llama(0).float()) == ("packed" if can else "plain")


def plain_and_quick(tied):
    plain, model = (random_llama(0, tie_word_embeddings=tied, qkv_bias=True) for _ in range(2))
    return plain.float(), model, quicken(model.float())


@pytest.mark.parametrize("tied", [False, True])
def test_weights_by_columns_stay_an_ordinary_model(tied):
    plain, model, how = plain_and_quick(tied)
    assert how == "columns" and model.lm_head.weight.t().is_contiguous()
    close(model(TOKENS), plain(TOKENS))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    plain.load_state_dict(model.state_dict())
    model.requires_grad_()(TOKENS).sum().backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.skipif(not can_pack(torch.float32), reason="PyTorch cannot pack weights here")
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_compute_the_same_and_are_for_inference_alone(tied, monkeypatch, tmp_path):
    monkeypatch.setattr(layout, "SMALL", 1)
    plain, model, how = plain_and_quick(tied)
    assert how == "packed" and isinstance(model.lm_head, PackedLinear)
    for rows in (1, 9):
        close(model(TOKENS[:, :rows]), plain(TOKENS[:, :rows]), rtol=1e-4, atol=1e-4)
    line = "packed weights are for inference alone, .* load_model(.*quick=False)"
    raises_line(save_model, ValueError, line, model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    raises_line(model.requires_grad_(), ValueError, line, TOKENS)
    raises_line(copy.deepcopy, ValueError, line, model)
    raises_line(model.load_state_dict, ValueError, line, plain.state_dict())
    raises_line(model.to("cpu").half, ValueError, line)
