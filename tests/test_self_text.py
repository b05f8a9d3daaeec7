"""Text that a model samples from itself, and a draft made from it: adapters, and a vocabulary of its own."""

import json
import shutil

import pytest
import torch
from helpers import WEIGHTS, random_llama

from s2d import generate, load_model
from s2d.soft import soft_losses
from s2d.train import __main__ as train
from s2d.train import self_text
from s2d.train.dialogues import one_a_row
from s2d.train.nested import among, most_frequent

BEFORE, AFTER = [1, 30], [2, 40, 41]  # a user's turn ends with 2, as answers do
TEMPLATE = "{% for m in messages %}{{ bos_token }}USER: {{ m['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %} SO:{% endif %}"


def conversations(model, batch, seed):
    return list(
        self_text.converse(model, BEFORE, AFTER, batch, torch.Generator().manual_seed(seed))
    )


def test_answers_are_what_the_model_says_to_its_questions(monkeypatch):
    """Rows in step, each at its own place: greedy answers are those that ``generate`` gives to the same prompt alone."""
    monkeypatch.setattr(self_text, "ANSWER_TOKENS", 20)
    model = random_llama(0, scale=0.1)
    made = conversations(model, 60, 1)
    assert 15 < len(made) < 60  # some questions never end
    assert {round(temperature, 3) for *_, temperature in made} == {0.0, 0.7, 1.0}
    for prompt, answer, temperature in made:
        assert (
            prompt[:2] == BEFORE
            and prompt[-3:] == AFTER
            and 2 not in prompt[:-3]
            and len(prompt) <= 2 + 48 + 2
        )
        assert (answer[-1] == 2 or len(answer) == 20) and 2 not in answer[:-1]
        if temperature == 0:
            assert generate(model, prompt, method="ar", max_new_tokens=20).tokens == answer
    assert len({tuple(prompt) for prompt, *_ in made}) > 15
    assert conversations(model, 60, 1) == made != conversations(model, 60, 2)


def test_labels_are_what_the_model_finds_likeliest_after_each_place():
    """Row by row and place by place, beside the plain model; nothing is learnt where nothing was."""
    model, rng = random_llama(0), torch.Generator().manual_seed(0)
    pairs = [(torch.randint(61, (p,), generator=rng).tolist(), torch.randint(61, (a,), generator=rng).tolist())
             for p, a in ((3, 9), (5, 1), (2, 25), (9, 4), (4, 12))]  # fmt: skip
    tokens, labels = one_a_row(pairs, 20)
    found = self_text.likeliest(model, tokens, labels, rows=2)
    assert found.dtype == labels.dtype and torch.equal(found == -100, labels == -100)
    for row, place in (labels != -100).nonzero().tolist():
        assert found[row, place] == model(tokens[row : row + 1, : place + 1])[0, -1].argmax()


def test_temperatures_of_answers():
    """First tokens of answers at T = 1 follow the model, counted: chi-square by groups of tokens."""
    model = random_llama(3, scale=0.1, max_position_embeddings=300)
    counts, expected = torch.zeros(61, dtype=torch.float64), torch.zeros(61, dtype=torch.float64)
    for seed in range(12):
        for prompt, answer, temperature in conversations(model, 60, seed):
            if temperature == 1.0:
                counts[answer[0]] += 1
                expected += model(torch.tensor([prompt]))[0, -1].softmax(dim=-1)
    order = expected.argsort(descending=True)
    groups = [order[i::6] for i in range(6)]
    statistic = sum(
        ((counts[g].sum() - expected[g].sum()) ** 2 / expected[g].sum()).item() for g in groups
    )
    assert counts.sum() > 80 and statistic < 20.5  # 0.1 % of chi-square with 5 degrees of freedom


def test_rows_and_labels():
    tokens, labels = one_a_row([([5, 6, 7], [8, 9, 2]), ([5], [8] * 9), ([5] * 9, [8])], 6)
    assert tokens.tolist() == [[5, 6, 7, 8, 9, 0], [5, 8, 8, 8, 8, 8], [5] * 6]
    assert labels.tolist() == [[-100, -100, 8, 9, 2, -100], [8] * 6, [-100] * 6]


def test_the_draft_vocabulary_is_what_occurs_most(capsys):
    labels = torch.tensor([[4, 4, 4, -100], [1, 1, 7, -100]], dtype=torch.int32)
    kept = most_frequent(labels, 2, 9)
    assert kept.tolist() == [1, 4]
    assert among(kept, labels, 9).tolist() == [[1, 1, 1, -100], [0, 0, -100, -100]]
    assert "16.7% of 6 tokens are outside" in capsys.readouterr().err
    with pytest.raises(ValueError, match="from 1 to 9 tokens, got 10"):
        most_frequent(labels, 10, 9)


def test_the_loss_of_a_draft_vocabulary_is_that_of_its_rows():
    model, tokens = random_llama(2), torch.randint(0, 61, (2, 9))
    labels = torch.randint(0, 61, (2, 9))
    model.keep_tokens(torch.tensor([3, 8, 40]))
    places = among(model.draft_vocabulary, labels.int().where(labels % 3 > 0, 8), 61)
    ours = soft_losses(model, tokens, places, (2, 4))
    for exit_layer, loss in zip((2, 4), ours):
        logits = model.logits(model.run_layers(model.embed(tokens), 0, exit_layer))[..., [3, 8, 40]]
        plain = torch.nn.functional.cross_entropy(logits[places >= 0], places[places >= 0].long())
        assert abs(loss - plain) < 1e-5


@pytest.fixture
def asking(tmp_path, monkeypatch):
    """A copy of mini-7b with a chat template by which it can ask itself."""
    monkeypatch.setattr(self_text, "QUESTION_TOKENS", 120)
    monkeypatch.setattr(self_text, "ANSWER_TOKENS", 40)
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "base")
    config = json.loads((tmp_path / "base/tokenizer_config.json").read_text())
    (tmp_path / "base/tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": TEMPLATE})
    )
    return tmp_path


def soft(folder, *more):
    return train.main(["soft", "--init", str(folder / "base"), "--layers", "4", "--exits", "2,4", "--data", "self", "--device", "cpu",
                       "--millions", "0.001", "--length", "96", "--out", str(folder / "draft"), *more])  # fmt: skip


def test_a_draft_from_the_models_own_text(asking, capsys):
    assert (
        soft(
            asking,
            "--lora",
            "4",
            "--draft-vocabulary",
            "200",
            "--batch",
            "4",
            "--micro-batch",
            "4",
            "--epochs",
            "3",
        )
        == 0
    )
    said = capsys.readouterr().err
    assert "draft.self.jsonl: " in said and "tokens are outside" in said and "exit 2:" in said
    text = (asking / "draft.self.jsonl").read_text()
    draft, base = load_model(asking / "draft"), load_model(asking / "base")
    assert (
        len(draft.draft_vocabulary) == 200
        and draft.config.exit_layers == (2, 4)
        and draft.config.num_hidden_layers == 4
    )
    assert {path.name for path in (asking / "draft").iterdir()} == {
        "config.json", "adapter_config.json", "adapter_model.safetensors", "draft_vocabulary.json", ".written-by-s2d"}  # fmt: skip
    records = [json.loads(line) for line in text.splitlines()[1:]]
    tokens, labels = one_a_row([(record["p"], record["a"]) for record in records], 96)
    labels = among(draft.draft_vocabulary, labels, 1024)
    untrained = load_model(asking / "base", num_layers=4)
    untrained.keep_tokens(draft.draft_vocabulary)
    with torch.no_grad():
        before, after = (
            soft_losses(model, tokens.long(), labels, (2, 4)) for model in (untrained, draft)
        )
    assert (after < before - 0.5).all()
    prompt = records[0]["p"]
    for method in ("s2d", "s2d-tree"):
        base64, draft64 = (load_model(asking / name, dtype="float64") for name in ("base", "draft"))
        alone = generate(base64, prompt, method="ar", max_new_tokens=20).tokens
        assert (
            generate(base64, prompt, draft=draft64, method=method, max_new_tokens=20).tokens
            == alone
        )
    # Again: the text is found, more of it is sampled, and a folder of ours is replaced.
    (asking / "draft.self.jsonl").write_text(text + '{"p": [1, 2')  # as a kill leaves it
    assert (
        soft(
            asking,
            "--lora",
            "2",
            "--millions",
            "0.02",
            "--batch",
            "4",
            "--micro-batch",
            "4",
            "--epochs",
            "1",
        )
        == 0
    )
    longer = (asking / "draft.self.jsonl").read_text()
    assert (
        longer.startswith(text)
        and len(longer) > len(text)
        and all(json.loads(line) for line in longer.splitlines())
    )
    assert base.config.vocab_size == 1024


def test_adapters_go_on_after_a_stop_to_the_same_weights(asking, monkeypatch, capsys):
    arguments = [
        "--lora",
        "4",
        "--batch",
        "4",
        "--micro-batch",
        "4",
        "--epochs",
        "2",
        "--draft-vocabulary",
        "100",
    ]
    assert soft(asking, *arguments) == 0
    whole = (asking / "draft/adapter_model.safetensors").read_bytes()
    shutil.rmtree(asking / "draft")
    from s2d.train import fit, nested

    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)

    def stopped(name, where, exits, steps, tokens_a_step, training):
        for step, _ in training:
            if step == 5:
                raise ValueError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(nested, "show_progress", stopped)
        assert soft(asking, *arguments) == 2
    size = sum(path.stat().st_size for path in (asking / "draft.checkpoint").iterdir())
    assert size < 3 * 4 * 2 * len(whole)  # the adapters and AdamW's state of them, not the model
    assert soft(asking, *arguments) == 2 and "go on with --resume" in capsys.readouterr().err
    assert soft(asking, *arguments, "--resume") == 0
    assert (asking / "draft/adapter_model.safetensors").read_bytes() == whole


def test_what_cannot_be_sampled(asking, capsys):
    def refused(message, *more):
        assert soft(asking, *more) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error

    (asking / "other.jsonl").write_text('{"model": "00000000"}\n')
    refused("was sampled from another model", "--text", str(asking / "other.jsonl"))
    refused(
        "has from 1 to 1024 tokens, got 2000",
        "--text",
        str(write_text(asking)),
        "--draft-vocabulary",
        "2000",
    )
    refused("expected at least", "--millions", "0")
    (asking / "base/tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}"})
    )
    refused("leaves out what the user says")
    (asking / "base/tokenizer_config.json").write_text("{}")
    refused("needs a model with a chat template of its own")


def write_text(folder):
    model, file = load_model(folder / "base", dtype="bfloat16"), folder / "some.jsonl"
    self_text.SelfText(file, model).add([([1, 5], [6, 7, 2], 0.0)] * 1000)
    assert self_text.SelfText(file, model).count == 3000
    return file
