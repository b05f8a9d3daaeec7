"""The decision model: what it sees, what it refuses; it decides where drafts end."""

from types import SimpleNamespace

import pytest
import torch
from helpers import WEIGHTS, program, raises_line, random_llama, refuses

from s2d import generate
from s2d.generation import start
from s2d.mcsd import decision
from s2d.mcsd.decision import Decision, DecisionRule, fingerprint, load_decision, with_decision
from s2d.rules import Prediction, Proposal
from s2d.train import __main__ as train
from s2d.train.decision import collect, fit_decision


def test_the_two_feature_sets():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 20, generator=generator)
    prediction = Prediction(logits.double(), 0.5, torch.randn(3, 8, generator=generator))
    stats = Decision("stats", 8, 0.4, "").inputs(prediction)
    for row, probs in zip(stats, logits.double().softmax(-1)):
        expected = [-(probs @ probs.log()).item(), *sorted(probs.tolist())[:-11:-1]]
        assert row.tolist() == pytest.approx(expected, abs=1e-6)
    scaled = Decision("hidden", 8, 0.4, "").inputs(prediction)
    norms = prediction.hidden.square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(scaled, prediction.hidden / norms)
    published = [layer.out_features for layer in Decision("hidden", 8, 0.4, "").layers[::2]]
    assert published == [512, 256, 1]


class Fixed(Decision):
    """A decision model that says the same of everything, but for a hopeless node of two."""

    def __init__(self, says, hopeless=None):
        super().__init__("stats", 8, 0.5, "")
        self.says, self.hopeless = says, hopeless

    def inputs(self, prediction):
        return prediction.logits

    def forward(self, logits):
        said = torch.full((len(logits),), self.says)
        if self.hopeless is not None and len(said) == 2:
            said[self.hopeless] = 0.05
        return said


def test_siblings_divide_what_the_first_leaves():
    """A drawn child has an estimate, whatever the model says; where there is none, it gets none."""
    proposal = Proposal(torch.tensor([[5, 6, 7]] * 2), torch.tensor([[0.5, 0.3, 0.1], [1, 0, 0]]))
    for says, expected in ((0.8, [0.8, 0.15, 0.05]), (1.0, [1.0, 1e-30, 1e-30])):
        rule = SimpleNamespace(propose=lambda *given: proposal, verify=None, exact=True)
        said = Prediction(torch.ones(2, 9), 0.5)
        judged = DecisionRule(rule, Fixed(says)).propose(None, None, said, 3).estimates
        assert judged.tolist() == [pytest.approx(expected, rel=1e-6), pytest.approx([says, 0, 0])]


@pytest.mark.parametrize("setting", [dict(method="sd"), dict(method="s2d-tree", tree=(1,) * 6)])
def test_drafting_stops_when_the_product_is_below_the_threshold(setting):
    """0.8 a token and threshold 0.5: 0.8, 0.64, 0.512, 0.4096, so the fourth token is the last."""
    target = random_llama(0, eos_token_ids=())
    options = dict(draft=target, max_new_tokens=40, exits=[4], **setting)
    stopped = generate(target, [3, 1], drafter=with_decision(Fixed(0.8)), stop=0.5, **options)
    assert stopped.tokens == generate(target, [3, 1], **options).tokens
    assert set(stopped.stats.accept_lengths[:-1]) == {5}  # four accepted, and the bonus token
    assert stopped.stats.draft_levels == pytest.approx(4 * stopped.stats.steps, abs=3)


@pytest.mark.parametrize("hopeless", [0, 1])
def test_a_fork_goes_on_where_a_path_is_likely(hopeless):
    """Probabilities multiply along a path: one hopeless root does not stop the other."""
    target = random_llama(0, eos_token_ids=())
    drafter = with_decision(Fixed(0.6, hopeless))
    steps = start(target, [3, 1], target, tree=(2, 1, 1), exits=[4], stop=0.2, drafter=drafter)
    trees = [step.tree for step in steps if step.tree.depth == 3]
    assert trees and all(tree.nodes[5].path[1] is tree.nodes[2 - hopeless] for tree in trees)
    assert all(len(tree.nodes) == 6 for tree in trees)


def test_a_file_keeps_its_configuration_and_fits_its_draft(tmp_path):
    draft, file = random_llama(1), tmp_path / "d.safetensors"
    made = Decision("hidden", 32, 0.35, fingerprint(draft.model.norm.weight))
    decision.save_decision(made, file)
    loaded = load_decision(file)
    single = random_llama(1).float()  # a draft in another dtype is the same
    assert fingerprint(single.model.norm.weight) == made.draft
    assert (loaded.features, loaded.threshold, loaded.draft) == ("hidden", 0.35, made.draft)
    some = torch.randn(3, 32)
    assert torch.equal(loaded(some), made(some))
    for file in (WEIGHTS / "mini-draft/model.safetensors", tmp_path / "nowhere"):
        raises_line(load_decision, ValueError, "no decision model at", file)


def test_training_finds_what_decides():
    """Labels that depend on one feature are learnt; soft ones lead to calibrated predictions."""
    torch.manual_seed(0)
    features = torch.rand(4000, 11)
    labels = torch.sigmoid(6 * features[:, 3] - 3)
    model = Decision("stats", 8, 0.4, "")
    fit_decision(model, features, labels, epochs=12, seed=0)
    with torch.inference_mode():
        scores = model.layers(features)[:, 0].sigmoid()
    assert (scores - labels).abs().mean() < 0.03


def test_labels_are_probabilities_of_acceptance():
    """Of a flat draft: the product of ten probabilities of 1 / 32,000 is 0 in float32."""
    options = dict(vocab_size=32000, hidden_size=8, num_hidden_layers=1, eos_token_ids=())
    target, draft = (random_llama(seed, 0.02, **options).float() for seed in (0, 1))
    same = random_llama(0, eos_token_ids=())
    for pair, low, high in (((target, draft), 0.0, 0.9), ((same, same), 1 - 1e-6, 1.0)):
        pair = SimpleNamespace(target=pair[0], draft=pair[1])
        inputs, labels = collect(Decision("stats", 8, 0.4, ""), pair, [[3, 1, 4] * 30])
        assert len(inputs) == len(labels) > 40 and ((0 <= labels) & (labels <= 1)).all()
        assert low < labels.mean() <= high


def test_the_training_command(tmp_path, capsys, mini):
    line = ["decision", "--target", WEIGHTS / "mini-7b", "--draft", WEIGHTS / "mini-draft"]
    out = tmp_path / "new/d.safetensors"
    assert program(train.main, *line, "--out", out, "--prompts", 2) == 0
    assert "learnt from mini, 6 times" in capsys.readouterr().err
    shipped = load_decision(WEIGHTS / "mini-draft/decision-7b.safetensors")
    name = fingerprint(mini("mini-draft").model.norm.weight)
    assert load_decision(out).draft == shipped.draft == name
    refuses(train.main, capsys, "d.safetensors is there already", *line, "--out", out)
    out.unlink()
    message = "no file nowhere; expected mini, or a file"
    refuses(train.main, capsys, message, *line, "--out", out, "--data", "nowhere")
