"""On every device there is: the target's text, and attention called as GPU kernels ask."""

import pytest
import torch
import torch.nn.functional as F
from helpers import random_llama

from s2d import generate
from s2d.tree import Dynamic

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SETTINGS = [
    dict(method="ar"),
    dict(method="sd", exits=[4]),
    dict(method="s2d", stop=0.1),
    dict(method="mcsd", tree=(3, 2, 1), exits=[4]),
    dict(method="s2d-tree", tree=Dynamic(3, 4, 10)),
]


def models(device, dtype):
    target = random_llama(0, eos_token_ids=())
    draft = random_llama(1, exit_layers=(1, 2, 4), thresholds=(0.3, 0.3, 0.0))
    return [model.to(device=device, dtype=dtype) for model in (target, draft)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_device_writes_the_same_text(device, setting):
    target, draft = models("cpu", torch.float64)
    expected = generate(target, [5, 3, 1], method="ar", max_new_tokens=60).tokens
    target, draft = models(device, torch.float64)
    assert generate(target, [5, 3, 1], draft, max_new_tokens=60, **setting).tokens == expected


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_attention_is_called_as_gpu_kernels_ask(device, setting, monkeypatch):
    """At any length: mask rows begin at multiples of 16 bytes, and no kernel plans each length."""
    masked, attention = [], F.scaled_dot_product_attention

    def checked(q, k, v, attn_mask=None, **options):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        if attn_mask is not None:
            masked.append(attn_mask)
            assert attn_mask.data_ptr() % 16 == 0 and attn_mask.stride(-1) == 1
            for stride in attn_mask.stride()[:-1]:
                assert stride * attn_mask.element_size() % 16 == 0
        return attention(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    target, draft = models(device, torch.bfloat16)
    for count in range(20, 28):
        output = generate(target, [5, 3, 1], draft, max_new_tokens=count, **setting)
        assert len(output.tokens) == count
    assert (masked or setting["method"] == "ar") and torch.backends.cuda.cudnn_sdp_enabled()
