"""The decision model: what it sees, how it learns, what it refuses; it decides where drafts end."""

import json
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import WEIGHTS, assert_refused, change_json, program, raises_line, random_llama

from s2d import generate
from s2d.decision import Decision, fingerprint, load_decision, save_decision
from s2d.generation import start
from s2d.rules import Prediction, Proposal
from s2d.train import __main__ as train
from s2d.train.decision import fit_decision
from s2d.tree import FixedShape, Tree


def features_of(decision, logits, hidden=None):
    """What a decision model sees of logits (R, V), and of hidden states (R, hidden)."""
    probs = torch.as_tensor(logits, dtype=torch.float64).softmax(-1)
    used = SimpleNamespace(frontier_hidden=lambda tree: hidden)
    return decision.inputs(used, None, Prediction(probs, 0.5))


def test_the_two_feature_sets():
    generator = torch.Generator().manual_seed(0)
    logits, hidden = torch.randn(3, 20, generator=generator), torch.randn(3, 8, generator=generator)
    stats = features_of(Decision("stats", 8, 0.4, ""), logits)
    for row, probs in zip(stats, logits.double().softmax(-1)):
        expected = [-(probs @ probs.log()).item(), *sorted(probs.tolist())[:-11:-1]]
        assert row.tolist() == pytest.approx(expected, abs=1e-6)
    scaled = features_of(Decision("hidden", 8, 0.4, ""), logits, hidden)
    assert torch.allclose(scaled, hidden / hidden.square().mean(-1, keepdim=True).sqrt())
    sizes = {"hidden": [(512, 8), (256, 512), (1, 256)], "stats": [(44, 11), (1, 44)]}
    for features, shapes in sizes.items():
        model = Decision(features, 8, 0.4, "")
        assert [tuple(p.shape) for p in model.parameters() if p.dim() == 2] == shapes
        found = model(features_of(model, logits, hidden))
        assert found.shape == (3,) and (found > 0).all() and (found < 1).all()


class Fixed(Decision):
    """A decision model that says the same of everything, or what a function of the tree says."""

    def __init__(self, says):
        super().__init__("stats", 8, 0.5, "")
        self.says = says

    def inputs(self, used, tree, prediction):
        return tree

    def forward(self, tree):
        if callable(self.says):
            return torch.tensor([self.says(tree, node) for node in tree.frontier])
        return torch.full((len(tree.frontier),), self.says)

    def prepare_for(self, draft):
        pass


def test_siblings_divide_what_the_first_leaves():
    tree = Tree([1], FixedShape((3,)), max_levels=2)
    proposal = Proposal([[5, 6, 7]], [[0.5, 0.3, 0.1]])
    [judged] = Fixed(0.8).judge(None, tree, None, proposal)
    assert judged == pytest.approx([0.8, 0.15, 0.05])
    assert Fixed(0.8).judge(None, tree, None, Proposal([[5]], [[0.1]])) == [[pytest.approx(0.8)]]


@pytest.mark.parametrize("setting", [dict(method="sd"), dict(method="s2d-tree", tree=(1,) * 6)])
def test_drafting_stops_when_the_product_is_below_the_threshold(setting):
    """0.8 a token and threshold 0.5: 0.8, 0.64, 0.512, 0.4096, so the fourth token is the last."""
    target = random_llama(0, eos_token_ids=())
    options = dict(draft=target, max_new_tokens=40, exits=[4], **setting)
    stopped = generate(target, [3, 1], decision=Fixed(0.8), **options)
    assert stopped.tokens == generate(target, [3, 1], **options).tokens
    assert set(stopped.stats.accept_lengths[:-1]) == {5}  # four accepted, and the bonus token
    assert stopped.stats.draft_levels == pytest.approx(4 * stopped.stats.steps, abs=3)
    never = generate(target, [3, 1], decision=Fixed(1.0), **options)
    assert set(never.stats.accept_lengths[:-1]) == {7}


def test_a_fork_goes_on_where_a_path_is_likely():
    """Probabilities multiply along a path: one hopeless root does not stop the other."""
    target = random_llama(0, eos_token_ids=())
    for hopeless in (0, 1):
        says = Fixed(lambda tree, node, hopeless=hopeless: 0.05 if node == hopeless else 0.6)
        steps = start(
            target, [3, 1], target, "mcsd", tree=(2, 1, 1), exits=[4], decision=says, stop=0.2
        )
        trees = [step.tree for step in steps if step.tree.level_count == 3]
        assert trees and all(tree.parents == [-1, -1, 0, 1, 3 - hopeless] for tree in trees)


def test_training_finds_what_decides():
    """Labels that depend on one feature are learnt; soft ones lead to calibrated predictions."""
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(4000, 11, generator=generator)
    labels = torch.sigmoid(6 * features[:, 3] - 3)
    torch.manual_seed(0)
    model = Decision("stats", 8, 0.4, "")
    fit_decision(model, features, labels, epochs=12, seed=0)
    with torch.inference_mode():
        scores = model.layers(features)[:, 0].sigmoid()
    assert (scores - labels).abs().mean() < 0.03


def test_a_file_keeps_its_configuration_and_fits_its_draft(tmp_path):
    draft, file = random_llama(1), tmp_path / "d.safetensors"
    made = Decision("hidden", 32, 0.35, fingerprint(draft))
    save_decision(made, file)
    loaded = load_decision(file)
    loaded.prepare_for(random_llama(1).float())  # a draft in another dtype is the same
    assert (loaded.features, loaded.threshold, loaded.draft) == ("hidden", 0.35, fingerprint(draft))
    some = torch.randn(3, 32)
    assert torch.equal(loaded(some), made(some))
    assert [path.name for path in tmp_path.iterdir()] == ["d.safetensors"]
    other = f"is for draft {fingerprint(draft)}, not "
    for another in (random_llama(2), random_llama(1, hidden_size=64)):
        raises_line(loaded.prepare_for, ValueError, other, another)
    for name in ("model.safetensors", "config.json", "nowhere"):
        message = "no decision model at"
        raises_line(load_decision, ValueError, message, WEIGHTS / "mini-draft" / name)


def test_the_training_command(tmp_path, capsys, mini):
    """What it learns to foresee is whether the target accepts."""
    models = ["--target", WEIGHTS / "mini-7b", "--draft", WEIGHTS / "mini-draft"]
    out, train_decision = tmp_path / "new/d.safetensors", partial(program, train.main, "decision")
    assert train_decision(*models, "--out", out, "--prompts", 8) == 0
    said, notices = capsys.readouterr()
    shares = re.search(
        r"right about ([\d.]+)% of \d+ drafted .*right about ([\d.]+)%$", said.strip()
    )
    assert float(shares[1]) > 60 and 20 < float(shares[2]) < 100
    assert "learnt from mini, 6 times" in notices and "8 dialogues in Vicuna's format" in notices
    assert load_decision(out).features == "stats"
    for message, *more in (
        ("expected 5 prompts, 1 epoch or more", "--prompts", "2"),
        ("no model folder", "--target", "nowhere"),
        ("no file nowhere; --data is", "--data", "nowhere"),
    ):
        assert_refused(capsys, message, train_decision, *models, "--out", out, *more)


def test_training_on_a_file(tmp_path, capsys):
    """Of the questions that there are a fifth is kept out; those that cannot be asked are none.

    It is the file that the draft has learnt from, unless another is named.
    """
    questions = ["\ud800", "word " * 2000, *(f"What is {number}?" for number in range(6))]
    said = [{"messages": [{"role": "user", "content": each}]} for each in questions]
    for each in said:
        each["messages"].append({"role": "assistant", "content": "Fine."})
    (tmp_path / "d.json").write_text(json.dumps(said))
    shutil.copytree(WEIGHTS / "mini-draft", tmp_path / "draft")
    change_json(tmp_path / "draft/config.json", learnt_from=str(tmp_path / "d.json"))
    line = ["decision", "--target", WEIGHTS / "mini-7b", "--draft", tmp_path / "draft"]
    line += ["--out", tmp_path / "d.safetensors", "--epochs", 1]
    assert program(train.main, *line) == 0
    notices = capsys.readouterr().err
    assert "for 5 questions, 1 more were kept out; 6 dialogues" in notices
    assert (
        "2 passed over (1: " in notices and f"learnt from {tmp_path / 'd.json'}, 1 times" in notices
    )
    (tmp_path / "d.json").write_text(json.dumps(said[:6]))
    assert_refused(capsys, "gives 4 questions; expected 5", program, train.main, *line)


def test_shipped_models_belong_to_the_shipped_draft(mini):
    for target in ("7b", "13b", "70b"):
        file = WEIGHTS / "mini-draft" / f"decision-{target}.safetensors"
        decision = load_decision(file)
        decision.prepare_for(mini("mini-draft"))
        assert 0.0 < decision.threshold < 1.0
