"""On every device there is: the target's text, and attention called as GPU kernels ask."""

import pytest
import torch
import torch.nn.functional as F
from helpers import random_llama

from s2d import generate
from s2d.tree import Dynamic

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_writes_the_text_and_calls_kernels_as_they_ask(device, monkeypatch):
    """Mask rows begin at multiples of 16 bytes, and no kernel plans each length."""
    masked, attention = [], F.scaled_dot_product_attention

    def checked(q, k, v, attn_mask=None, **options):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        if attn_mask is not None:
            masked.append(attn_mask)
            assert attn_mask.data_ptr() % 16 == 0 and attn_mask.stride(-1) == 1
            for stride in attn_mask.stride()[:-1]:
                assert stride * attn_mask.element_size() % 16 == 0
        return attention(q, k, v, attn_mask=attn_mask, **options)

    target = random_llama(0, eos_token_ids=())
    draft = random_llama(1, exit_layers=(1, 2, 4), thresholds=(0.3, 0.3, 0.0))
    expected = generate(target, [5, 3, 1], method="ar", max_new_tokens=60).tokens
    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    models = [model.to(device) for model in (target, draft)]
    for tree in (None, (3, 2, 1), Dynamic(3, 4, 10)):
        method = {None: "s2d", (3, 2, 1): "mcsd"}.get(tree, "s2d-tree")
        output = generate(models[0], [5, 3, 1], models[1], method, max_new_tokens=60, tree=tree)
        assert output.tokens == expected
    assert masked and torch.backends.cuda.cudnn_sdp_enabled()
