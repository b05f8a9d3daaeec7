"""The SoFT loss."""

import torch
import torch.nn.functional as F
from helpers import random_llama

from s2d.soft import soft_losses


def example():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (3, 20), generator=generator)
    labels = torch.randint(0, 61, (3, 20), generator=generator)
    labels[torch.rand(3, 20, generator=generator) < 0.4] = -100
    return tokens, labels


def test_each_loss_is_that_of_a_model_cut_off_at_the_exit():
    tokens, labels = example()
    full = random_llama(0)
    losses = soft_losses(full, tokens, labels, (1, 3, 4))
    for exit_layer, loss in zip((1, 3, 4), losses):
        cut = random_llama(0, num_hidden_layers=exit_layer)
        cut.load_state_dict({name: t for name, t in full.state_dict().items() if name in cut.state_dict()})
        logits, wanted = cut(tokens), labels != -100
        separate = F.cross_entropy(logits[wanted], labels[wanted])
        assert abs(loss - separate) < 1e-6  # the loss is taken in float32
    assert losses.max() - losses.min() > 0.01


def test_gradients_reach_every_layer_through_every_exit_above_it():
    tokens, labels = example()
    model = random_llama(1).requires_grad_(True)
    for exits, silent in (((2, 3, 4), []), ((2,), [2, 3]), ((1, 3), [3])):
        model.zero_grad()
        soft_losses(model, tokens, labels, exits).mean().backward()
        for number, block in enumerate(model.model["layers"]):
            for parameter in block.parameters():
                reached = parameter.grad is not None and parameter.grad.abs().max() > 0
                assert reached == (number not in silent)
