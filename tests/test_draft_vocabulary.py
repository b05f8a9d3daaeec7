"""A draft that drafts some tokens only: it says of these what the whole head says; exact output."""

import json

import pytest
import torch
from enumeration import EveryOutcome, enumerate_outcomes
from helpers import load_transformers, random_llama

from s2d import decode, generate, load_model
from s2d.draft import SortedDraft
from s2d.sampling import Sampler, Sampling
from s2d.tree import Dynamic, KConfig
from s2d.weights import save_model

KEPT = torch.tensor([1, 4, 5])
SHAPES = {
    "sd": {"draft_length": 2},
    "s2d": {"draft_length": 2},
    "mcsd": {"tree": (2, 1)},
    "s2d-tree": {"tree": Dynamic(2, 1, 2)},
}


class EveryDraw(EveryOutcome):
    """And every way in which candidates can be drawn."""

    def candidates(self, probs, count, replacement):
        rows = []
        for row in probs:
            drawn, rest = [], row.clone()
            for _ in range(count):
                token = self._choose((rest / rest.sum()).tolist())
                drawn.append(token)
                rest = rest if replacement else rest.index_fill(0, torch.tensor(token), 0.0)
            rows.append(drawn)
        return torch.tensor(rows)


def models(seed):
    sizes = {
        "vocab_size": 6,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "eos_token_ids": (),
    }
    target, draft = (
        random_llama(seed + each, scale=0.5, exit_layers=(1, 3), thresholds=(0.6, 0.0), **sizes)
        for each in (0, 1)
    )
    draft.keep_tokens(KEPT)
    return target, draft


@pytest.mark.parametrize("method", SHAPES)
@pytest.mark.parametrize("replacement", [False, True])
def test_the_output_is_distributed_as_the_target_alone(method, replacement, monkeypatch):
    """Every outcome of drafting and verifying two tokens, through ``generate`` itself."""
    target, draft = models(0)
    prompt, joint, drafted = [3, 1], torch.zeros(6, 6, dtype=torch.float64), set()

    def decide(sampler):
        monkeypatch.setattr(decode, "Sampler", lambda seed, device: sampler)
        seen = lambda step: drafted.update(step.proposal.tree.tokens.tolist())  # noqa: E731
        how = {"temperature": 1.0, "replacement": replacement, "on_step": seen, **SHAPES[method]}
        return generate(target, prompt, draft=draft, method=method, max_new_tokens=2, **how).tokens

    monkeypatch.setattr("enumeration.EveryOutcome", EveryDraw)
    for tokens, chance in enumerate_outcomes(decide):
        joint[tuple(tokens)] += chance
    first = target(torch.tensor([prompt]))[0, -1].softmax(dim=-1)
    expected = torch.stack(
        [first[x] * target(torch.tensor([[*prompt, x]]))[0, -1].softmax(dim=-1) for x in range(6)]
    )
    assert (joint - expected).abs().max() < 1e-9
    assert drafted <= set(KEPT.tolist()) and len(drafted) >= 2


@pytest.mark.parametrize("method", SHAPES)
@pytest.mark.parametrize("init", ["draft", "target"])
def test_greedy_text_is_the_targets(method, init):
    for seed in range(6):
        target, draft = models(10 * seed)
        alone = generate(target, [2, 5], method="ar", max_new_tokens=30).tokens
        shape = (
            {"draft_length": 5}
            if "draft_length" in SHAPES[method]
            else {"tree": Dynamic(3, 4, 9) if "s2d" in method else (3, 1, 1)}
        )
        if init == "target" and method in ("mcsd", "s2d-tree"):
            continue  # several roots from the target are not lossless
        assert (
            generate(
                target, [2, 5], draft=draft, method=method, init=init, max_new_tokens=30, **shape
            ).tokens
            == alone
        )


def test_what_it_says_is_what_the_whole_head_says_of_these_tokens():
    draft = models(3)[1]
    hidden = torch.randn(4, 16, dtype=torch.float64)
    assert (draft.draft_logits(hidden) - draft.logits(hidden)[:, KEPT]).abs().max() < 1e-12
    draft.requires_grad_(True)  # while it learns, the head's rows are those that are learnt
    with torch.no_grad():
        draft.lm_head.weight[4] += 1.0
    assert (draft.draft_logits(hidden) - draft.logits(hidden)[:, KEPT]).abs().max() < 1e-12
    draft.requires_grad_(False)


@pytest.mark.parametrize("shape", [KConfig((2, 2)), Dynamic(2, 2, 4)])
def test_drafted_tokens_and_their_distributions(shape):
    """Every node of a tree is a kept token; q is 0 elsewhere and sums up to 1."""
    draft = models(4)[1]
    drafter = SortedDraft(draft, (1, 3), (0.6, 0.0), shape, capacity=20)
    proposal = drafter.grow(
        torch.tensor([[3, 1, 2]]), 3, 2, Sampling(0.7, 0.9, False, Sampler(0, "cpu"))
    )
    assert set(proposal.tree.tokens.tolist()) <= set(KEPT.tolist())
    if isinstance(shape, Dynamic):
        assert proposal.q is None
        return
    others = [token for token in range(6) if token not in KEPT]
    assert proposal.q.shape == (3, 6) and (proposal.q[:, others] == 0).all()
    assert torch.allclose(proposal.q.sum(dim=-1), torch.ones(3, dtype=torch.float64))


def test_more_children_than_it_has_tokens():
    target, draft = models(5)
    for method, tree in (("mcsd", (4, 1)), ("s2d-tree", Dynamic(4, 2, 6))):
        with pytest.raises(
            ValueError,
            match="a node cannot have 4 different children: there are 3 tokens that the draft",
        ):
            generate(target, [1], draft=draft, method=method, tree=tree)


def test_it_is_kept_in_the_folder(tmp_path):
    draft = models(6)[1]
    save_model(draft, tmp_path / "m", dtype=torch.float64)
    read = load_model(tmp_path / "m", dtype="float64")
    hidden = torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(read.draft_vocabulary, KEPT)
    assert (read.draft_logits(hidden) - draft.draft_logits(hidden)).abs().max() < 1e-12
    tokens = torch.tensor([[1, 2, 3]])
    assert (
        load_transformers(tmp_path / "m", torch.float64)(tokens).logits - draft(tokens)
    ).abs().max() < 1e-10
    assert load_model(tmp_path / "m", num_layers=2).draft_vocabulary is None
    for content, message in (
        *(("{", "not valid JSON"), ("[]", "no list of different"), ("{}", "no list")),
        *(("[1, 1]", "no list of different"), ("[6]", "within 0..5"), ('["1"]', "no list")),
    ):
        (tmp_path / "m/draft_vocabulary.json").write_text(content)
        with pytest.raises(ValueError, match=message) as refused:
            load_model(tmp_path / "m")
        assert "\n" not in str(refused.value)
    (tmp_path / "m/draft_vocabulary.json").write_text(json.dumps([5, 1]))
    assert load_model(tmp_path / "m").draft_vocabulary.tolist() == [5, 1]
