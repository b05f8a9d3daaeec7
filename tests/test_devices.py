"""On every device there is, each method writes the text that the target alone writes on the CPU."""

import pytest
import torch
from helpers import random_llama

from s2d import generate
from s2d.tree import GrowingShape

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_writes_the_same_text(device):
    target = random_llama(0, eos_token_ids=())
    draft = random_llama(1, exits=(1, 2, 4), thresholds=(0.3, 0.3, 0.0))
    expected = generate(target, [5, 3, 1], method="ar", max_new_tokens=60).tokens
    models = [model.to(device) for model in (target, draft)]
    for method, tree in (("s2d", None), ("mcsd", (3, 2, 1)), ("s2d-tree", GrowingShape(3, 4, 10))):
        output = generate(models[0], [5, 3, 1], models[1], method, max_new_tokens=60, tree=tree)
        assert output.tokens == expected
