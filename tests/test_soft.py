"""The SoFT loss."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Operations, random_llama
from torch.distributions import Categorical, kl_divergence

from s2d import soft
from s2d.soft import soft_losses
from s2d.train.nested import Teacher


def exit_hidden(model, tokens, exits):
    return [model.run_layers(model.embed(tokens), 0, each) for each in exits]


def example():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (3, 20), generator=generator)
    labels = torch.randint(0, 61, (3, 20), generator=generator)
    labels[torch.rand(3, 20, generator=generator) < 0.4] = -100
    return tokens, labels


@pytest.mark.parametrize("chunk", [7, 1024])
def test_each_loss_is_that_of_a_model_cut_off_at_the_exit(chunk, monkeypatch):
    monkeypatch.setattr(soft, "CHUNK", chunk)
    full, (tokens, labels) = random_llama(0), example()
    learnt, losses = labels >= 0, soft_losses(full, tokens, labels, (1, 3, 4))
    for exit_layer, loss in zip((1, 3, 4), losses):
        cut = random_llama(0, num_hidden_layers=exit_layer)
        cut.load_state_dict({name: full.state_dict()[name] for name in cut.state_dict()})
        separate = F.cross_entropy(cut(tokens)[learnt], labels[learnt])
        assert abs(loss / learnt.sum() - separate) < 1e-6  # the loss is taken in float32
    assert losses.max() - losses.min() > 1


def test_rows_without_labels_give_no_loss_and_no_gradient():
    tokens, model = example()[0], random_llama(1).requires_grad_(True)
    losses = soft_losses(model, tokens, torch.full_like(tokens, -100), (2, 4))
    losses.mean().backward()
    assert losses.tolist() == [0.0, 0.0]
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_the_teachers_term(monkeypatch):
    """Against torch.distributions, at every exit; the teacher learns nothing."""
    monkeypatch.setattr(soft, "CHUNK", 7)
    tokens, labels = example()
    model = random_llama(3).requires_grad_(True)
    teacher = random_llama(4, num_hidden_layers=2, hidden_size=24).requires_grad_(True)
    plain, learnt = soft_losses(model, tokens, labels, (2, 4)), labels != -100
    losses = Teacher(teacher).losses(model, tokens, labels, (2, 4))
    p = Categorical(logits=teacher(tokens)[learnt])
    for number, hidden in enumerate(exit_hidden(model, tokens, (2, 4))):
        q = Categorical(logits=model.logits(hidden)[learnt])
        assert abs(losses[number] - plain[number] - kl_divergence(p, q).sum()) < 1e-4
    losses.mean().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_alignment_is_the_mean_square_between_features():
    (tokens, labels), exits = example(), (2, 4)
    model, teacher = random_llama(1).requires_grad_(True), random_llama(2)
    plain, learnt = soft_losses(model, tokens, labels, exits), labels != -100
    losses = Teacher(teacher, 3.0).losses(model, tokens, labels, exits)
    taught = teacher.model.norm(teacher.run_layers(teacher.embed(tokens)))[learnt]
    for one, other, hidden in zip(losses, plain, exit_hidden(model, tokens, exits)):
        expected = 3 * ((model.model.norm(hidden)[learnt] - taught) ** 2).mean(dim=1).sum()
        assert abs(one - other - expected) < 1e-5 * expected
    gradient = torch.autograd.grad((losses - plain).sum(), model.model.norm.weight)[0]
    assert gradient.abs().max() > 1e-3


def test_memory_does_not_grow_with_exits_or_tokens_times_vocabulary(monkeypatch):
    """Of loss and gradients: no tensor is larger than a chunk's logits, and these are not kept."""
    monkeypatch.setattr(soft, "CHUNK", 40)
    tokens = torch.arange(200).view(10, 20)
    model = random_llama(0, vocab_size=997).requires_grad_(True)
    kept = []

    def keep(x):
        kept.append(x.numel())
        return x

    with Operations() as seen, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        soft_losses(model, tokens, tokens, (1, 2, 3)).mean().backward()
    assert max(kept) < seen.largest == 40 * 997
