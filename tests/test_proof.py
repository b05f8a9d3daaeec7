"""The exact law of a program, what is refused, and how far rules are from the target."""

import os
import random
import secrets
import subprocess
import sys
import time
from functools import partial
from random import random as bound_random

import numpy as np
import pytest
import torch
from helpers import ROOT, raises_line
from numpy.random import default_rng as bound_default_rng
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import _speculative_sampling

from s2d.proof import Law, TableModel, law, measure, text_law
from s2d.proof.lossless import DRAFT, RULES, SHAPES, TARGET, Mistaken
from s2d.rules import Rejection
from s2d.sampling import Draws, warp
from s2d.tree import GrowingShape

P = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
HELD = {"numpy": np.random.default_rng(0), "python": random.random, "count": []}


def twice():
    number = torch.rand(1).item()
    return number < 0.2, number < 0.5


def in_place():
    numbers = torch.rand(2, 1)
    numbers[0].mul_(2).clamp_(max=1.0)
    return numbers[:, 0] < 0.5


def gumbel():
    return [(P.log() - torch.empty(3).exponential_().log()).argmax()]


# Programs, and the probabilities of what they return, in order.
DRAWN = [
    (lambda: torch.multinomial(P, 1), P),
    (lambda: P.multinomial(2), [0.06 / 0.8, 0.1 / 0.8, 0.06 / 0.7, 0.15 / 0.7, 0.2, 0.3]),
    (lambda: torch.bernoulli(P[:2]), [0.56, 0.24, 0.14, 0.06]),
    (lambda: [(P.cumsum(0) < torch.rand(())).sum()], P),
    (lambda: [random.random() > 0.3], [0.3, 0.7]),
    (lambda: [bound_random() > 0.3], [0.3, 0.7]),
    (lambda: [0.3 < each for each in torch.rand_like(P[1:])], [0.09, 0.21, 0.21, 0.49]),
    (lambda: [float("nan") > torch.rand(())], [1.0]),
    (lambda: [Draws(1).flip(0.7), Draws(2).draw(P[None])], [*(0.3 * P), *(0.7 * P)]),
    (twice, [0.5, 0.3, 0.2]),
    (in_place, [0.375, 0.375, 0.125, 0.125]),
    (gumbel, P),
    (lambda: torch.tensor([random.random() * 2, torch.empty(()).uniform_(1, 3)]) < 2, [0.25] * 4),
]


@pytest.mark.parametrize(("program", "expected"), DRAWN)
def test_the_law_of_a_program(program, expected):
    found = law(lambda draws: program(), points=256)
    allowed = 1e-12 if found.enumerated else 0.01
    probs = [prob for _, prob in sorted(found.probs.items())]
    assert probs == pytest.approx(list(expected), abs=allowed)
    assert found.enumerated == (program not in [in_place, gumbel, DRAWN[-1][0]])


UNSEEN = {
    "by PyTorch in a way": lambda: torch.randn(1) > 0,
    "by PyTorch": lambda: [torch.manual_seed(0).initial_seed(), torch.rand(1) > 0.5],
    "rand with generator=": lambda: torch.rand(1, generator=torch.Generator()) > 0.5,
    "randn with generator=": lambda: torch.randn(1, generator=torch.Generator()) > 0,
    "by numpy.random.default_rng": lambda: [bound_default_rng(0).random() < 0.5],
    "by numpy.random.PCG64": lambda: [np.random.Generator(np.random.PCG64(0)).random() < 0.5],
    "by numpy.random.rand": lambda: [np.random.rand() < 0.5],
    "by random.choice": lambda: [random.choice([1, 2])],
    "by random.Random": lambda: [random.Random(0).random() < 0.5],
    "by Python's random": lambda: [HELD["python"]() < 0.5],
    "by os.urandom": lambda: [secrets.randbelow(3)],
    "two Draws with the seed 1": lambda: [Draws(1).flip(0.5), Draws(1).flip(0.5)],
    "two runs": lambda: [HELD["numpy"].random() < 0.5],
    "keeps something": lambda: [HELD["count"].append(1) or len(HELD["count"]) % 2],
    "two runs of the program": lambda: [torch.rand(1) < time.perf_counter() % 1],
    "more than 20 outcomes": lambda: torch.rand(5) < 0.5,
    "more than 256 uniform numbers": lambda: torch.rand(300) < 0.5,
    "nothing can be drawn": lambda: torch.multinomial(0 * P, 1),
}


@pytest.mark.parametrize("message", UNSEEN)
def test_what_is_not_seen_is_refused(message):
    """And everything is as it was before."""
    raises_line(law, ValueError, message, lambda draws: UNSEEN[message](), limit=20)
    assert 0 <= np.random.rand() < 1 and type(os.urandom(1)) is bytes
    assert bound_random is random.random and type(torch.rand(1)) is torch.Tensor


def test_where_two_laws_differ():
    laws = [Law({(0,): 0.5, (1,): 0.5}, True), Law({(0,): 0.4, (1,): 0.3, (2,): 0.3}, True)]
    assert laws[0].distance(laws[1]) == pytest.approx(0.3)
    assert laws[0].worst(laws[1], 2) == [((2,), 0.0, 0.3), ((1,), 0.5, 0.3)]


def test_a_table_has_the_call_of_a_model():
    """Its cache may be cut."""
    text = torch.tensor([[1, 2, 0, 1], [0, 0, 2, 2]])
    whole = TARGET(text, use_cache=False)
    past = TARGET(text[:, :3]).past_key_values
    past = [[each[:, :, :2] for each in layer] for layer in past]
    assert torch.equal(TARGET(text[:, 2:], past_key_values=past).logits, whole.logits[:, 2:])
    assert torch.equal(whole.logits[1, 3], TARGET.logits_after([0, 0, 2, 2])[0])


@pytest.mark.parametrize("name", RULES)
def test_right_rules_are_exact_and_every_mistake_shows(name):
    chain, tree = (measure(RULES[name], widths, points=256) for widths in SHAPES.values())
    worst = max(chain.distance, tree.distance)
    if name.startswith("right"):
        assert worst < (1e-12 if chain.enumerated else 0.02)
    else:
        assert worst > 0.02
    assert chain.enumerated == ("noise" not in name) and tree.accepted > 0


@pytest.mark.parametrize("tree", [(1, 1, 1), (3,), (2, 2), (1, 2), GrowingShape(2, 2, 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_shapes_and_temperatures(tree, temperature):
    found = measure("rejection", tree, temperature)
    assert found.distance < 1e-12 and found.accepted > 0 and found.enumerated
    if tree == (2, 2) and temperature:
        assert measure(partial(Mistaken, "none"), tree) == pytest.approx(found)


class ByTorch(Rejection):
    """A rule of one's own, which takes its numbers elsewhere; after two nodes, it may forget p."""

    def __init__(self, distribution, draws, flip, forgets=False):
        super().__init__(distribution, draws)
        draws.flip = flip
        self.forgets = forgets

    def verify(self, tree, logits):
        accepted, bonus = super().verify(tree, logits)
        return (accepted, 0) if self.forgets and len(accepted) == 2 else (accepted, bonus)


def test_rules_of_ones_own():
    """They are checked as ``generate`` does, and a mistake in the last token shows."""
    by_torch = partial(ByTorch, flip=lambda chance: (torch.rand(1) < chance).item())
    target = TableModel(seed=1, vocab_size=4)
    models = dict(target=target, draft=TableModel(2, 4, mixed_with=target))
    assert measure(by_torch, (2, 1), **models).distance < 1e-12
    assert measure(partial(by_torch, forgets=True), (1, 1)).distance > 0.01
    by_python = partial(ByTorch, flip=lambda chance: random.random() < chance)
    assert measure(by_python, (1, 1)).distance < 1e-12
    by_numpy = partial(ByTorch, flip=lambda chance: HELD["numpy"].random() < chance)
    raises_line(measure, ValueError, "two runs of the program", by_numpy, (1, 1))
    raises_line(measure, ValueError, "a rule has exact", lambda *parts: object(), (1, 1))
    raises_line(measure, ValueError, "expected 1 to|expected up to", "rejection", (0,))


def test_the_function_of_transformers():
    def distance(depth, **options):
        def step(draws):
            text = torch.zeros((1, 0), dtype=torch.long)
            for _ in range(depth):
                q = DRAFT.logits_after(text[0].tolist()).softmax(dim=-1)
                text = torch.cat((text, q.multinomial(1)), dim=1)
            texts = [text[0, :end].tolist() for end in range(depth + 1)]
            q = DRAFT.logits_after(*texts[:-1])[None]
            p = TARGET.logits_after(*texts)[None]
            return _speculative_sampling(text, q, depth, p, **options)[0][0]

        own = lambda text: TARGET.logits_after(text)[0].softmax(dim=-1)  # noqa: E731
        expected = text_law(own, depth + 1)
        return text_law(own, depth + 1, law(step)).distance(expected)

    assert max(distance(depth) for depth in (1, 2, 3)) < 1e-12
    assert distance(2, assistant_ensemble_weight=0.7) > 0.1


def test_a_whole_generate_of_transformers():
    sizes = dict(vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
    torch.manual_seed(0)
    target, draft = (LlamaForCausalLM(LlamaConfig(**sizes)).double().eval() for _ in range(2))
    for parameter in [*target.parameters(), *draft.parameters()]:
        torch.nn.init.normal_(parameter)
    drafting = dict(num_assistant_tokens=1, num_assistant_tokens_schedule="constant")
    draft.generation_config.update(assistant_confidence_threshold=0.0, **drafting)
    options = dict(assistant_model=draft, do_sample=True, temperature=0.7, top_k=0)

    def whole(draws):
        return target.generate(torch.tensor([[1, 2]]), max_new_tokens=2, **options)[0, 2:]

    @torch.no_grad()
    def own(text):
        return warp(target(torch.tensor([[1, 2, *text]])).logits[0, -1], temperature=0.7)

    found = law(whole)
    assert found.enumerated and found.distance(text_law(own, 2)) < 1e-6


def test_the_program():
    """It begins with the rules that are right; who reads may stop after a line."""
    command = f"{sys.executable} -m s2d.proof | head -5"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    cells = [cell.partition(" / ")[0] for cell in lines[-1].split(" | ")[1:]]
    assert len(lines) == 5 and cells == ["0", "0"]
    assert "Error" not in done.stderr
