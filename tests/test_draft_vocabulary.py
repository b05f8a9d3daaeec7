"""A draft that drafts some tokens only: it says of these what the whole head says; exact output."""

import json

import pytest
import torch
from enumeration import assert_lossless
from helpers import limit_to, raises_line, random_llama
from theirs import load_transformers

from s2d import generate, load_model
from s2d.extras.draft_head import draft_head
from s2d.tree import Dynamic
from s2d.weights import save_model

KEPT = torch.tensor([1, 4, 5])


def models(seed):
    sizes = dict(vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=3)
    options = dict(scale=0.5, eos_token_ids=(), exit_layers=(1, 3), thresholds=(0.6, 0.0))
    target, draft = (random_llama(each, **sizes, **options) for each in (seed, seed + 1))
    limit_to(draft, KEPT)
    return target, draft


SMALL = [
    *(dict(method=method, draft_length=2) for method in ("sd", "s2d")),
    *(dict(method="mcsd", tree=(2, 1), replacement=each) for each in (False, True)),
    dict(method="s2d-tree", tree=Dynamic(2, 1, 2)),
]


@pytest.mark.parametrize("options", SMALL)
def test_the_output_is_distributed_as_the_target_alone(options):
    """Every outcome of drafting and verifying two tokens, through ``start`` itself."""
    target, draft = models(0)
    _, seen = assert_lossless(target, [3, 1], 2, draft=draft, temperature=1.0, **options)
    drafted = {token for step in seen for token in step.proposal.tree.tokens.tolist()}
    assert drafted <= set(KEPT.tolist()) and len(drafted) >= 2


def test_what_it_says_is_what_the_whole_head_says_of_these_tokens():
    draft, hidden = models(3)[1], torch.randn(4, 16, dtype=torch.float64)
    few, head = draft.logits(hidden, draft.draft_head), draft.draft_head
    few, all_of_them = head.over_all(few, 6), draft.logits(hidden)
    assert (few[:, KEPT] - all_of_them[:, KEPT]).abs().max() < 1e-12
    assert few.isneginf().sum() == few.isinf().sum() == 4 * (6 - len(KEPT))


def test_more_children_than_it_has_tokens():
    target, draft = models(5)
    message = "4 different children: there are 3 tokens"
    for method, tree in (("mcsd", (4, 1)), ("s2d-tree", Dynamic(4, 2, 6))):
        raises_line(generate, ValueError, message, target, [1], draft, method, tree=tree)


def test_it_is_kept_in_the_folder(tmp_path):
    draft = models(6)[1]
    save_model(draft, tmp_path / "m", dtype=torch.float64)
    read = load_model(tmp_path / "m", dtype="float64")
    hidden = torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(read.draft_head.tokens, KEPT)
    few = [each.logits(hidden, each.draft_head) for each in (read, draft)]
    assert (few[0] - few[1]).abs().max() < 1e-12
    theirs = load_transformers(tmp_path / "m", torch.float64)(KEPT[None]).logits
    assert (theirs - draft(KEPT[None])).abs().max() < 1e-10
    assert draft_head(load_model(tmp_path / "m", num_layers=2)) is None
    for content, message in (
        *(("{", "not valid JSON"), ("[]", "no list of different"), ("{}", "no list")),
        *(("[1, 1]", "no list of different"), ("[6]", "within 0..5"), ('["1"]', "no list")),
    ):
        (tmp_path / "m/draft_vocabulary.json").write_text(content)
        raises_line(load_model, ValueError, message, tmp_path / "m")
    (tmp_path / "m/draft_vocabulary.json").write_text(json.dumps([5, 1]))
    assert load_model(tmp_path / "m").draft_head.tokens.tolist() == [5, 1]
