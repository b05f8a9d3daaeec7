"""The exact law of a program, what is refused, and how far rules are from the target."""

import os
import random
import time
from functools import partial
from random import random as bound_random

import numpy as np
import pytest
import torch
from helpers import blocks, raises_line
from numpy.random import default_rng as bound_rng
from transformers import LlamaConfig, LlamaForCausalLM

from s2d.proof import Law, TableModel, law, lossless, measure, text_law
from s2d.proof.lossless import RULES, Mistaken
from s2d.rules import Rejection, residual
from s2d.sampling import Distribution, Draws
from s2d.tree import GrowingShape

P = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
KEPT = {"numpy": np.random.default_rng(0), "python": random.random, "runs": []}


def twice():
    number = torch.rand(1).item()
    return number < 0.2, number < 0.5


def gumbel():
    return [(P.log() - torch.empty(3).exponential_().log()).argmax()]


def computed():
    return torch.tensor([random.random() * 2, torch.zeros(()).uniform_(-1, to=3)]) < 1


# Programs, and the probabilities of what they return, in order.
LAWS = [
    (lambda: torch.multinomial(P, 1), P),
    (lambda: P.multinomial(2), [0.06 / 0.8, 0.1 / 0.8, 0.06 / 0.7, 0.15 / 0.7, 0.2, 0.3]),
    (lambda: torch.bernoulli(P[:2]), [0.56, 0.24, 0.14, 0.06]),
    (lambda: torch.bernoulli(P[None, :1], 0.3), [0.7, 0.3]),
    (lambda: torch.rand_like(P[:1], dtype=P.dtype, device="cpu", generator=None) < 0.3, [0.7, 0.3]),
    (lambda: [(P.cumsum(0) < torch.rand(())).sum()], P),
    (lambda: [random.random() > 0.3], [0.3, 0.7]),
    (lambda: [0.3 < each for each in torch.rand_like(P[1:])], [0.09, 0.21, 0.21, 0.49]),
    (lambda: [float("nan") > torch.rand(())], [1.0]),
    (lambda: [Draws(1).flip(0.7), *Draws(2).draw(P[None])], [*(0.3 * P), *(0.7 * P)]),
    (twice, [0.5, 0.3, 0.2]),
    (gumbel, P),
    (computed, [0.25] * 4),
]


@pytest.mark.parametrize(("program", "expected"), LAWS)
def test_the_law_of_a_program(program, expected):
    found = law(lambda draws: program(), points=256)
    assert found.enumerated == (program not in [gumbel, computed])
    allowed = 1e-12 if found.enumerated else 0.01
    probs = [prob for _, prob in sorted(found.probs.items())]
    assert probs == pytest.approx([*map(float, expected)], abs=allowed)


REFUSED = {
    "by PyTorch": lambda: torch.randn(1) > 0,
    "rand with generator=": lambda: torch.rand(1, generator=torch.Generator()) > 0.5,
    "by a generator of NumPy": lambda: [bound_rng(0).random() < 0.5],
    "by NumPy": lambda: [np.random.rand() < 0.5],
    "by random.Random": lambda: [random.Random(0).random() < 0.5],
    "by Python's random": lambda: [bound_random() < 0.5],
    "by os.urandom": lambda: os.urandom(1),
    "two runs": lambda: [KEPT["numpy"].random() < 0.5],
    "keeps something": lambda: [KEPT["runs"].append(1) or len(KEPT["runs"]) % 2],
    "two runs of the program": lambda: [torch.rand(1) < time.perf_counter() % 1],
    "mul_ changes": lambda: torch.rand(2)[0].mul_(2) < 0.5,
    "more than 20 outcomes": lambda: torch.rand(5) < 0.5,
    "more than 256 uniform numbers": lambda: torch.rand(300) < 0.5,
    "nothing can be drawn": lambda: torch.multinomial(0 * P, 1),
    "are negative: is a clamp missing": lambda: torch.multinomial(P - 0.25, 1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_seen_is_refused(message):
    """And everything is as it was before."""
    raises_line(law, ValueError, message, lambda draws: REFUSED[message](), limit=20)
    assert 0 <= np.random.default_rng().random() < 1 and type(random.random()) is float
    assert type(torch.rand(1)) is torch.Tensor and type(Draws(1)) is Draws


SEEDING = [partial(torch.manual_seed, 1), partial(random.seed, 1), partial(np.random.seed, 1)]
SEEDING += [partial(torch.set_rng_state, torch.get_rng_state())]
SEEDING += [partial(torch.random.fork_rng()(torch.rand), 1)]


@pytest.mark.parametrize("seeding", SEEDING)
def test_a_program_that_seeds_is_refused(seeding):
    """Equal draws would count as independent. That it has seeded before the law hides nothing."""
    seeding()
    raises_line(law, ValueError, "or seeds", lambda draws: [torch.rand(1) < 0.5, bool(seeding())])


def test_a_module_may_seed_as_it_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "seeding.py").write_text("import random\nrandom.Random(0)")
    monkeypatch.syspath_prepend(tmp_path)
    assert law(lambda draws: [bool(__import__("seeding"))]).probs == {(1,): 1.0}


def test_where_two_laws_differ():
    laws = [Law({(0,): 0.5, (1,): 0.5}, True), Law({(0,): 0.4, (1,): 0.3, (2,): 0.3}, True)]
    assert laws[0].distance(laws[1]) == pytest.approx(0.3)
    assert laws[0].worst(laws[1], 2) == [((2,), 0.0, 0.3), ((1,), 0.5, 0.3)]
    assert text_law(lambda text: torch.tensor([1.0, 0.0]), 2).probs == {(0, 0): 1.0}


def test_a_table_has_the_call_of_a_model():
    """Its cache may be cut. It looks at the whole text, and at its positions."""
    model, text = TableModel(seed=1), torch.tensor([[1, 2, 0, 1], [0, 0, 2, 2]])
    past = [[each[:, :, :2] for each in layer] for layer in model(text[:, :3]).past_key_values]
    whole = model(text).logits
    assert torch.equal(model(text[:, 2:], past_key_values=past).logits, whole[:, 2:])
    assert torch.equal(whole[1, 3], model.logits_after([0, 0, 2, 2])[0])
    assert not torch.equal(whole[1, 3], model.logits_after([1, 0, 2, 2])[0])
    assert torch.equal(whole, model(text, position_ids=torch.arange(4)[None]).logits)
    assert not torch.equal(whole, model(text, position_ids=torch.arange(1, 5)[None]).logits)
    assert model(text, use_cache=False).past_key_values is None


@pytest.mark.parametrize("name", RULES)
def test_right_rules_are_exact_and_every_mistake_shows(name):
    """The noise is integrated over few points. Two mistakes need a second child."""
    widths = (2,) if "child" in name else (1, 1)
    found = measure(RULES[name], widths, points=512)
    assert found.enumerated == ("noise" not in name)
    if name.startswith("right"):
        assert found.distance < (1e-12 if found.enumerated else 0.03)
    else:
        assert found.distance > (0.02 if found.enumerated else 0.06)


@pytest.mark.parametrize("widths", [(3,), (1, 2), GrowingShape(2, 2, 3)])
def test_shapes_and_temperatures(widths):
    """At 0 nothing is drawn. Without its mistake, a rule is right."""
    found = measure("rejection", widths)
    assert found.distance < 1e-12 and found.accepted > 0 and found.enumerated
    assert measure("rejection", widths, temperature=0.0).distance == 0
    if widths == (3,):
        assert measure(partial(Mistaken, "none"), widths) == pytest.approx(found)


def own(flip, forgets=False):
    """A rule that takes its numbers elsewhere; after two nodes, it may forget p."""

    class Own(Rejection):
        def verify(self, tree, logits):
            self.draws.flip = flip
            accepted, bonus = super().verify(tree, logits)
            return accepted, 0 if forgets and len(accepted) == 2 else bonus

    return Own


def test_rules_of_ones_own():
    """They are ``checked``, and a mistake in the last token shows."""
    target = TableModel(seed=1, vocab_size=2)
    models = dict(target=target, draft=TableModel(2, 2, mixed_with=target))
    for flip in (lambda chance: random.random() < chance, lambda chance: torch.rand(()) < chance):
        assert measure(own(flip), (1, 1), **models).distance < 1e-12
        assert measure(own(flip, forgets=True), (1, 1), **models).distance > 0.01
    by_numpy = own(lambda chance: KEPT["numpy"].random() < chance)
    raises_line(measure, ValueError, "two runs", by_numpy, (1, 1), **models)
    beyond = type("Own", (Rejection,), {"verify": lambda *given: ([], 2)})
    raises_line(measure, ValueError, "a bonus token is one of 2", beyond, (1, 1), **models)


class BlockVerification(Rejection):
    """Of a chain (Sun et al. 2024, arXiv 2403.10444, algorithm 2); it may forget its weight."""

    forgets = False

    def verify(self, tree, logits):
        p, weight, accepted = self.distribution(logits), torch.ones(()), []
        chain = tree.nodes[1:]
        left = residual(p[0], chain[0].q)
        for row, (node, following) in enumerate(zip(chain, [*chain[1:], None])):
            before = 1.0 if self.forgets else weight
            weight = (before * p[row, node.token] / node.q[node.token]).clamp(max=1.0)
            chance, rest = weight, p[row + 1]
            if following is not None:
                rest = (weight * p[row + 1] - following.q).clamp(min=0.0)
                chance = rest.sum() / (rest.sum() + 1.0 - weight)
            if self.draws.flip(chance.item()):  # also where a shorter part has failed
                accepted, left = chain[: row + 1], rest
        return accepted, self.draws.draw(left[None]).item()


def test_a_rule_that_depends_on_the_whole_path():
    assert measure(BlockVerification, (1, 1)).distance < 1e-12
    forgetful = type("Forgetful", (BlockVerification,), {"forgets": True})
    assert measure(forgetful, (1, 1)).distance > 0.01


def test_the_function_of_transformers_as_the_readme_measures_it(capsys):
    for block in blocks("s2d/proof/README.md"):
        exec(block, {})
    *right, lossy = map(float, capsys.readouterr().out.splitlines()[0].split())
    assert len(right) == 3 and max(right) < 1e-12 and lossy > 0.05


def test_a_whole_generate_of_transformers():
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8) | dict(vocab_size=3)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=2, eos_token_id=None)
    target, draft = (LlamaForCausalLM(LlamaConfig(**sizes)).double().eval() for _ in range(2))
    torch.manual_seed(0)
    for parameter in [*target.parameters(), *draft.parameters()]:
        torch.nn.init.normal_(parameter)
    draft.generation_config.update(num_assistant_tokens=1, assistant_confidence_threshold=0.0)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    options = dict(assistant_model=draft, do_sample=True, temperature=0.7, top_k=0)

    def whole(draws):
        return target.generate(torch.tensor([[1, 2]]), max_new_tokens=2, **options)[0, 2:]

    @torch.no_grad()
    def alone(text):
        return Distribution(0.7)(target(torch.tensor([[1, 2, *text]])).logits[0, -1])

    found = law(whole)
    assert found.enumerated and found.distance(text_law(alone, 2)) < 1e-6


def test_the_table_of_the_program(monkeypatch, capsys):
    """A row of it: that of the paper's rule, which is right."""
    name, rule = next(iter(RULES.items()))
    monkeypatch.setattr(lossless, "RULES", {name: rule})
    monkeypatch.setattr(lossless, "TREES", {"chain 1,1": (1, 1)})
    lossless.print_table()
    assert capsys.readouterr().out.endswith(f"|\n| {name} | 0 / 1.25 |\n")
