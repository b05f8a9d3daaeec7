"""The SoFT loss."""

import pytest
import torch
import torch.nn.functional as F
from helpers import limit_to, peak_growth, random_llama
from torch.distributions import Categorical, kl_divergence

from s2d import soft
from s2d.soft import exit_hidden, soft_losses
from s2d.train.distil import Distillation
from s2d.train.nested import among


def example():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (3, 20), generator=generator)
    labels = torch.randint(0, 61, (3, 20), generator=generator)
    labels[torch.rand(3, 20, generator=generator) < 0.4] = -100
    return tokens, labels


@pytest.mark.parametrize("chunk, drafted", [(7, None), (1024, None), (1024, range(0, 61, 3))])
def test_each_loss_is_that_of_a_model_cut_off_at_the_exit(chunk, drafted, monkeypatch):
    """Of a draft that drafts some tokens only, with these rows of the LM head."""
    monkeypatch.setattr(soft, "CHUNK", chunk)
    full, (tokens, labels), columns = random_llama(0), example(), slice(None)
    if drafted:
        columns = torch.tensor(drafted)
        limit_to(full, columns)
        labels = among(columns, labels, 61)
    wanted, losses = labels >= 0, soft_losses(full, tokens, labels, (1, 3, 4))
    for exit_layer, loss in zip((1, 3, 4), losses):
        cut = random_llama(0, num_hidden_layers=exit_layer)
        cut.load_state_dict({name: full.state_dict()[name] for name in cut.state_dict()})
        separate = F.cross_entropy(cut(tokens)[wanted][:, columns], labels[wanted].long())
        assert abs(loss - separate) < 1e-6  # the loss is taken in float32
    assert losses.max() - losses.min() > 0.01


def test_gradients_reach_every_layer_through_every_exit_above_it():
    (tokens, labels), model = example(), random_llama(1).requires_grad_(True)
    for exits, silent in (((2, 3, 4), []), ((2,), [2, 3]), ((1, 3), [3])):
        model.zero_grad()
        soft_losses(model, tokens, labels, exits).mean().backward()
        for number, block in enumerate(model.model["layers"]):
            gradients = [parameter.grad for parameter in block.parameters()]
            reached = [each is not None and each.abs().max() > 0 for each in gradients]
            assert all(each == (number not in silent) for each in reached)


def test_rows_without_labels_give_no_loss_and_no_gradient():
    tokens, model = example()[0], random_llama(1).requires_grad_(True)
    losses = soft_losses(model, tokens, torch.full_like(tokens, -100), (2, 4), count=5)
    losses.mean().backward()
    assert losses.tolist() == [0.0, 0.0]
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["forward", "reverse", "tv"])
def test_the_teachers_term(kind):
    """Against torch.distributions, at every exit; the teacher learns nothing."""
    tokens, labels = example()
    model, teacher = random_llama(3), random_llama(4, num_hidden_layers=2, hidden_size=24)

    def losses(teacher=None):
        distillation = teacher and Distillation(teacher, kind)
        return soft_losses(model, tokens, labels, (2, 4), distillation=distillation)

    plain, with_teacher, wanted = losses(), losses(teacher), labels != -100
    p = Categorical(logits=teacher(tokens)[wanted])
    for number, hidden in enumerate(exit_hidden(model, tokens, (2, 4))):
        q = Categorical(logits=model.logits(hidden)[wanted])
        terms = {"forward": kl_divergence(p, q), "reverse": kl_divergence(q, p)}
        terms["tv"] = (p.probs - q.probs).clamp(min=0).sum(dim=-1)
        assert abs(with_teacher[number] - plain[number] - terms[kind].mean()) < 1e-5
    itself = losses(model)  # a teacher equal to the last exit
    assert abs(itself[1] - plain[1]) < 1e-6 < itself[0] - plain[0]
    model.requires_grad_(True)
    teacher.requires_grad_(True)
    losses(teacher).mean().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_memory_does_not_grow_with_exits_or_tokens_times_vocabulary():
    """Of loss and gradients, with a vocabulary whose logits at once would be 3 x 500 MiB."""
    prepare = (
        "import torch; from s2d.model import Llama, LlamaConfig; from s2d.soft import soft_losses\n"
        "c = LlamaConfig(32000, 16, 32, 3, 2, 2, 8, max_position_embeddings=4096)\n"
        "m, tokens = Llama(c), torch.randint(0, 32000, (1, 4096))\n"
        "def run(t): soft_losses(m, t, t, (1, 2, 3), recompute=True).mean().backward()\n"
        "run(tokens[:, :64])"
    )
    assert 100 < peak_growth(prepare, "run(tokens)") < 700  # logits of one chunk are 125 MiB
