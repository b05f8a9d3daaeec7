"""Training: it learns, it resumes, and a nested draft comes out as an ordinary folder with exits."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import WEIGHTS, random_llama

from s2d import dialogues, load_model, train
from s2d.weights import save_model


@pytest.fixture
def tiny(tmp_path, tokenizer):
    """A folder with a small random Llama and the miniature tokenizer."""
    model = random_llama(0, scale=0.1, vocab_size=tokenizer.vocab_size, max_position_embeddings=64)
    save_model(model, tmp_path / "base", dtype=torch.float32)
    (tmp_path / "base/tokenizer.model").write_bytes(tokenizer.pieces.serialized_model_proto())
    return tmp_path / "base"


def soft(folder, out, *more):
    return train.main(["soft", "--init", str(folder), "--layers", "3", "--exits", "1,2,3", "--out", str(out),
                       "--length", "48", "--batch", "4", *more])  # fmt: skip


def test_soft_makes_a_draft_that_has_learnt(tiny, tmp_path, capsys):
    assert soft(tiny, tmp_path / "draft", "--millions", "0.02", "--lr", "3e-3") == 0
    draft = load_model(tmp_path / "draft")
    assert draft.config.exit_layers == (1, 2, 3) and draft.config.thresholds == (0.5, 0.5, 0.0)
    assert draft.config.num_hidden_layers == 3
    progress = capsys.readouterr().err
    assert "exit 1:" in progress and "tokens/s" in progress and "min left" in progress
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "draft"]  # no checkpoint is left
    tokenizer = train.Tokenizer(tiny / "tokenizer.model")
    tokens, labels = dialogues.pack(dialogues.corpus_dialogues(9), tokenizer, 20, 48, answers_only=True)
    with torch.no_grad():
        before = train.soft_losses(load_model(tiny, num_layers=3), tokens, labels, (1, 2, 3))
        after = train.soft_losses(draft, tokens, labels, (1, 2, 3))
    assert (after < before - 0.5).all()


def test_resume_gives_the_same_losses(tmp_path, monkeypatch):
    """Stop in the middle, go on from the checkpoint: every later loss equals the uninterrupted run's."""
    tokens = torch.randint(0, 61, (40, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, dims=1)

    def run(checkpoint, resume=False, stop_after=None):
        model = random_llama(2, scale=0.1).float().requires_grad_(True)
        losses = []
        for step, loss in train.fit(model, (2, 4), tokens, labels, 4, 1e-3, checkpoint, resume):
            losses.append(loss.tolist())
            if step == stop_after:
                break
        return losses

    whole = run(tmp_path / "a.checkpoint")
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", -1)  # after every step
    assert run(tmp_path / "b.checkpoint", stop_after=6) == whole[:6]
    assert (tmp_path / "b.checkpoint").is_file()
    assert run(tmp_path / "b.checkpoint", resume=True) == whole[6:]
    assert whole[-1][1] < whole[0][1]


def test_labels_are_the_assistants_words(tokenizer):
    messages = ["Hi there", "Hello Anna", "How are you?", "Fine"]
    ids, is_answer = dialogues.encode_dialogue(tokenizer, messages)
    assert ids == tokenizer.encode_chat(messages[:3]) + tokenizer.encode("Fine")[1:] + [tokenizer.eos_id]
    learnt = [token for token, answer in zip(ids, is_answer) if answer]
    eos = tokenizer.eos_id
    assert learnt == tokenizer.encode("Hello Anna")[1:] + [eos] + tokenizer.encode("Fine")[1:] + [eos]
    tokens, labels = dialogues.pack([messages] * 3, tokenizer, 99, 10, answers_only=True)
    flat, used = tokens.flatten().tolist(), tokens.numel()
    assert flat == (ids * 3)[:used]
    following = zip((ids * 3)[1:], (is_answer * 3)[1:])
    assert labels.flatten().tolist() == [token if answer else -100 for token, answer in following][:used]


def test_sharegpt_records(tmp_path):
    turn = lambda speaker, text: {"from": speaker, "value": text}  # noqa: E731
    records = [
        {"conversations": [turn("human", "a"), turn("gpt", "b"), turn("human", "c")]},
        {"conversations": [turn("gpt", "x"), turn("human", "y")]},
        {"conversations": [turn("human", "d"), turn("gpt", "e")]},
    ]
    (tmp_path / "d.json").write_text(json.dumps(records))
    assert list(dialogues.read_sharegpt(tmp_path / "d.json")) == [["a", "b"], ["d", "e"]]


def test_soft_on_sharegpt_data(tiny, tmp_path):
    record = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning " * 40}]}
    (tmp_path / "d.json").write_text(json.dumps([record] * 5))
    assert soft(tiny, tmp_path / "draft", "--data", str(tmp_path / "d.json")) == 0
    assert load_model(tmp_path / "draft").config.exit_layers == (1, 2, 3)


def test_user_errors(tiny, tmp_path, capsys):
    (tmp_path / "bad.json").write_text('{"not": "a list"}')
    (tmp_path / "few.json").write_text("[]")
    for arguments, message in (
        (["--data", str(tmp_path / "bad.json")], "is not ShareGPT JSON"),
        (["--data", str(tmp_path / "few.json")], "gives 0 rows"),
        (["--data", str(tmp_path / "none.json")], "No such file"),
        (["--exits", "0,3"], "lie within the draft's 3 layers"),
        (["--layers", "7", "--exits", "2,7"], "cannot keep the first 7 of 4 layers"),
        (["--init", str(tmp_path / "nowhere")], "no model folder"),
        (["--exits", "1,2"], "the last exit must be the last of the 3 layers"),
    ):
        assert soft(tiny, tmp_path / "draft", *arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "draft").exists()


def test_miniature_shapes_have_the_stated_proportions():
    counts = {}
    for name, (config, _, _) in train.TARGETS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in train.Llama(config).parameters())
    with torch.device("meta"):
        draft_config = replace(train.TARGETS["mini-7b"][0], num_hidden_layers=train.DRAFT_LAYERS)
        counts["mini-draft"] = sum(p.numel() for p in train.Llama(draft_config).parameters())
    rounded = {name: round(count / 1e6, 1) for name, count in counts.items()}
    assert rounded == {"mini-7b": 3.4, "mini-13b": 6.1, "mini-70b": 14.4, "mini-draft": 1.6}


def test_mini_makes_the_whole_family(tmp_path, monkeypatch, capsys):
    """The command that made weights/, on smaller shapes: every member loads, a second run with --resume keeps all."""
    small = train.shape(5, 64, 2, 1)
    monkeypatch.setattr(train, "TARGETS", {name: (small, 0.01, 1e-3) for name in train.TARGETS})
    monkeypatch.setattr(train, "DRAFT_TOKENS", 0.01)
    assert train.main(["mini", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mini-13b", "mini-70b", "mini-7b", "mini-draft"]
    for name in train.TARGETS:
        assert load_model(tmp_path / name).config == small
    draft = load_model(tmp_path / "mini-draft")
    assert draft.config.exit_layers == (2, 3, 4) and draft.config.num_hidden_layers == 4
    shipped = (WEIGHTS / "mini-7b/tokenizer.model").read_bytes()
    assert (tmp_path / "mini-draft/tokenizer.model").read_bytes() == shipped
    capsys.readouterr()
    assert train.main(["mini", "--out", str(tmp_path), "--resume"]) == 0
    assert capsys.readouterr().err == ""
