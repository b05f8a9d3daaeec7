"""Text that a model samples from itself, and what is made of it: drafts and datastores."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import (
    WEIGHTS,
    assert_refused,
    change_json,
    limit_to,
    program,
    raises_line,
    random_llama,
)
from safetensors.torch import load_file, save_file

from s2d import Tokenizer, generate, load_model
from s2d.soft import soft_losses
from s2d.train import __main__ as train
from s2d.train import fit, nested, self_text
from s2d.train.dialogues import one_a_row
from s2d.train.nested import among, most_frequent
from s2d.weights import checksum, datastore
from s2d.weights.config import read_config
from s2d.weights.datastore import load_datastore, tokenizer_checksum, write_datastore

BEFORE, AFTER = [1, 30], [2, 40, 41]  # a user's turn ends with 2, as answers do
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}USER: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %} SO:{% endif %}"
)


def conversations(model, enough, seed):
    prompts = [[BEFORE], [[*BEFORE, 7, 8], [*BEFORE, 9]]]  # beginnings of questions, of two kinds
    return list(self_text.converse(model, prompts, AFTER, enough, 20, seed))


@pytest.fixture
def short(monkeypatch):
    """Questions and answers for a context of 128."""
    monkeypatch.setattr(self_text, "QUESTION_TOKENS", 48)
    monkeypatch.setattr(self_text, "ANSWER_TOKENS", 20)


def test_answers_are_what_the_model_says_to_its_questions(short):
    """Rows that others leave: greedy answers are ``generate``'s."""
    model = random_llama(0, scale=0.1)
    made = conversations(model, 1500, 1)
    assert sum(len(answer) for _, answer, _ in made[:-20]) < 1500  # no more begins than is needed
    for wanted in (0.0, 0.7, 1.0):
        assert sum(t == wanted for *_, t in made) > 0.2 * len(made)
    for prompt, answer, temperature in made:
        assert prompt[:2] == BEFORE and prompt[-3:] == AFTER and 2 not in prompt[:-3]
        assert len(prompt) <= 4 + 48 + 2
        assert (answer[-1] == 2 or len(answer) == 20) and 2 not in answer[:-1]
        if temperature == 0:
            assert generate(model, prompt, method="ar", max_new_tokens=20).tokens == answer
    assert len({tuple(prompt) for prompt, *_ in made}) > 0.8 * len(made)
    kinds = [prompt[2:4] == [7, 8] or prompt[2] == 9 for prompt, *_ in made]
    assert 0.3 < sum(kinds) / len(kinds) < 0.8
    assert conversations(model, 1500, 1) == made != conversations(model, 1500, 2)
    small, message = random_llama(0, max_position_embeddings=64), "the model's context of 64"
    raises_line(conversations, ValueError, message, small, 1, 0)
    model.model["norm"].weight[0] = torch.nan
    raises_line(conversations, ValueError, "the weights are damaged", model, 1, 0)


def test_labels_are_what_the_model_finds_likeliest_at_each_position():
    """One by one, beside the plain model; nothing is learnt where nothing was."""
    model, rng = random_llama(0), torch.Generator().manual_seed(0)
    sizes = ((3, 9), (5, 1), (2, 25), (9, 4), (4, 12))
    pairs = [[torch.randint(61, (n,), generator=rng).tolist() for n in both] for both in sizes]
    tokens, labels = one_a_row(pairs, 20)
    found = self_text.likeliest(model, tokens, labels, rows=2)
    assert found.dtype == labels.dtype and torch.equal(found == -100, labels == -100)
    for row, position in (labels != -100).nonzero().tolist():
        assert found[row, position] == model(tokens[row : row + 1, : position + 1])[0, -1].argmax()


def test_temperatures_of_answers(short):
    """First tokens of answers at T = 1 and 0.7 follow the model, counted: chi-square by groups."""
    model = random_llama(3, scale=0.1)
    made = conversations(model, 5000, 0)
    for wanted in (0.7, 1.0):
        some = [(prompt, answer[0]) for prompt, answer, t in made if t == wanted]
        counts = torch.tensor([first for _, first in some]).bincount(minlength=61).double()
        logits = torch.stack([model(torch.tensor([prompt]))[0, -1] for prompt, _ in some])
        expected = (logits / wanted).softmax(dim=-1).sum(dim=0)
        order = expected.argsort(descending=True)
        groups = [order[i::6] for i in range(6)]
        off = [(counts[g].sum() - expected[g].sum()) ** 2 / expected[g].sum() for g in groups]
        assert len(some) > 80 and sum(off) < 20.5  # 0.1 % of chi-square with 5 degrees of freedom


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
    raises_line(most_frequent, ValueError, "from 1 to 9 tokens, got 10", labels, 10, 9)


@pytest.fixture
def asking(tmp_path, monkeypatch):
    """A copy of mini-7b with a chat template by which it can ask itself; it learns in float32."""
    monkeypatch.setattr(nested, "SELF", replace(nested.SELF, bf16=False))
    monkeypatch.setattr(self_text, "QUESTION_TOKENS", 120)
    monkeypatch.setattr(self_text, "ANSWER_TOKENS", 40)
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "base")
    change_json(tmp_path / "base/tokenizer_config.json", chat_template=TEMPLATE)
    return tmp_path


def soft(folder, *more):
    small = ["--device", "cpu", "--millions", "0.001", "--length", "96"]
    where = ["--init", folder / "base", "--out", folder / "draft", "--data", "self"]
    return program(train.main, "soft", "--layers", 4, "--exits", "2,4", *where, *small, *more)


LEARNING = ["--batch", "4", "--micro-batch", "4", "--epochs"]


def test_a_draft_from_the_models_own_text(asking, capsys):
    assert soft(asking, "--lora", "4", "--draft-vocabulary", "200", *LEARNING, "3") == 0
    said = capsys.readouterr().err
    assert "draft.self.jsonl: " in said and "tokens are outside" in said and "exit 2:" in said
    text = (asking / "draft.self.jsonl").read_text()
    draft = load_model(asking / "draft")
    assert len(draft.draft_head.tokens) == 200
    assert draft.config.exit_layers == (2, 4) and draft.config.num_hidden_layers == 4
    written = {path.name for path in (asking / "draft").iterdir()}
    adapter = {"config.json", "adapter_config.json", "adapter_model.safetensors"}
    assert written == adapter | {"draft_vocabulary.json", ".written-by-s2d"}
    records = [json.loads(line) for line in text.splitlines()[1:]]
    tokens, labels = one_a_row([(record["p"], record["a"]) for record in records], 96)
    labels = among(draft.draft_head.tokens, labels, 1024)
    untrained = load_model(asking / "base", num_layers=4)
    limit_to(untrained, draft.draft_head.tokens)
    with torch.no_grad():
        losses = [soft_losses(each, tokens.long(), labels, (2, 4)) for each in (untrained, draft)]
    assert (losses[1] < losses[0] - 0.5).all()
    target, draft = (load_model(asking / name, dtype="float64") for name in ("base", "draft"))
    ways = "ar", "s2d", "s2d-tree"
    alone, *drafted = (generate(target, records[0]["p"], draft, way).tokens for way in ways)
    assert drafted == [alone, alone]
    more = "--lora", "2", "--millions", "0.0015", *LEARNING, "1"
    capsys.readouterr()
    assert_refused(capsys, "draft is there already", soft, asking, *more, "--resume")
    assert soft(asking, *more, "--replace") == 0
    assert (asking / "draft.self.jsonl").read_text().startswith(text)


def test_adapters_go_on_after_a_stop_to_the_same_weights(asking, monkeypatch, capsys):
    arguments = ["--lora", "4", "--draft-vocabulary", "100", *LEARNING, "2", "--millions", "0.0005"]
    assert soft(asking, *arguments) == 0
    whole = (asking / "draft/adapter_model.safetensors").read_bytes()
    shutil.rmtree(asking / "draft")
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)

    def stopped(*training):
        for step, _ in fit.fit(*training):
            if step == 5:
                raise ValueError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(nested, "fit_and_tell", stopped)
        assert soft(asking, *arguments) == 2
    size = sum(path.stat().st_size for path in (asking / "draft.checkpoint").iterdir())
    assert size < 3 * 4 * 2 * len(whole)  # the adapters and AdamW's state of them, not the model
    assert soft(asking, *arguments) == 2 and "go on with --resume" in capsys.readouterr().err
    assert soft(asking, *arguments, "--resume") == 0
    assert (asking / "draft/adapter_model.safetensors").read_bytes() == whole


def test_what_cannot_be_sampled(asking, capsys):
    """A file that does not begin as those of samples do is left as it is."""
    mine, text, config = (asking / name for name in ("mine", "text", "base/tokenizer_config.json"))
    for content in (b'{"model": "00000000"}\n', b'[{"id": 1}]', b'{"model": "', b"\xff\xfe\n"):
        mine.write_bytes(content)
        message = "was sampled from another model, or is none of these files"
        assert_refused(capsys, message, soft, asking, "--text", mine)
        assert mine.read_bytes() == content
    header = {"model": checksum(load_model(asking / "base", dtype="float32"))}
    lines = [header, *[{"p": [1, 5], "a": [6, 7, 2], "T": 0.0}] * 1000]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for template, message, *more in (
        (TEMPLATE, "from 1 to 1024 tokens, got 0", "--text", text, "--draft-vocabulary", 0),
        (TEMPLATE, "from 1 to 1024 tokens, got 2000", "--text", text, "--draft-vocabulary", 2000),
        (TEMPLATE, "expected at least", "--millions", "0"),
        (TEMPLATE, "is from 1 to 4096, got 0", "--lora", "0"),
        ("{{ bos_token }}", "leaves out what the user says"),
        (..., "needs a chat template of its own"),
    ):
        change_json(config, chat_template=template)
        assert_refused(capsys, message, soft, asking, *more)


def make(folder, *more):
    return program(train.main, "text", "--target", folder / "base", "--device", "cpu", *more)


def read_datastore(folder, name="base/datastore.safetensors"):
    return load_datastore(folder / name, 1024, tokenizer_checksum(folder / "base")).tolist()


def test_a_datastore_of_a_models_answers(asking, capsys):
    """Every answer behind the template's words and before an EOS; killed, it goes on."""
    assert make(asking, "--millions", "0.002") == 0
    said = capsys.readouterr().err
    assert "answer tokens of 2000" in said and "later runs of this target draft from it" in said
    raw = asking / "base/datastore.self.jsonl"
    first, text = read_datastore(asking), raw.read_text()
    _, after = self_text.ways_to_ask(asking / "base")
    expected, count = [], 0
    for record in map(json.loads, text.splitlines()[1:]):
        assert record["p"][-len(after) :] == after
        if count < 2000:
            expected += after[1:] + record["a"] + [2] * (record["a"][-1] != 2)
        count += len(record["a"])
    assert first == expected
    raw.write_text(text + '{"p": [1, 2')  # as a kill leaves it
    assert_refused(capsys, "is there already", make, asking, "--millions", "0.0035")
    assert make(asking, "--millions", "0.0035", "--replace") == 0
    assert raw.read_text().startswith(text) and len(read_datastore(asking)) > 3500
    assert read_datastore(asking)[: len(first)] == first  # more of it, in the same order
    longer = raw.read_bytes()
    assert make(asking, "--millions", "0.001", "--replace") == 0  # what there is is enough
    assert raw.read_bytes() == longer and 1000 <= len(read_datastore(asking)) < 1400
    capsys.readouterr()
    for answer in ([1024], [-1], [1.5], [[1]], "xx", 7):
        raw.write_text(text + json.dumps({"p": [1], "a": answer, "T": 0}) + "\n")
        more = "--millions", "0.0001", "--replace"
        assert_refused(capsys, "is damaged", make, asking, *more)
    assert len(read_datastore(asking)) >= 1000  # what was there is still there


def test_a_datastore_of_any_text(tmp_path):
    """Files are documents; a vocabulary of more than 65,536 ids needs four bytes for each."""
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "base")
    (tmp_path / "a.txt").write_text("The capital of Tadastan.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Zwölf Boxkämpfer\n", encoding="utf-8")
    out = tmp_path / "new/store.safetensors"
    assert make(tmp_path, "--from", tmp_path / "a.txt", tmp_path / "b.txt", "--out", out) == 0
    tokenizer = Tokenizer(tmp_path / "base")
    a, b = (tokenizer.encode((tmp_path / f"{name}.txt").read_text("utf-8")) for name in "ab")
    assert read_datastore(tmp_path, "new/store.safetensors") == [*a, 2, *b, 2]
    assert load_file(out)["tokens"].dtype == torch.uint16
    large = tmp_path / "large.safetensors"
    write_datastore(large, [[70_000], [3, 5]], 5, 100_000, "t", "text")
    assert load_datastore(large, 100_000, "t").tolist() == [70_000, 5, 3, 5]


def test_what_is_no_datastore_of_this_model(tmp_path):
    path, some = tmp_path / "d.safetensors", torch.tensor([1]).int()
    right = {"kind": "s2d datastore", "vocab_size": "61", "tokenizer": "t"}
    for tokens, metadata, message in (
        (some, {"tokenizer": "a"}, "another vocabulary .tokenizer a, not t"),
        (some, {"vocab_size": "60"}, "another vocabulary .vocab_size 60, not 61"),
        (some, {"kind": "x"}, "is no datastore"),
        (some + 60, {}, "ids outside of 0..60"),
        (some - 2, {}, "ids outside of 0..60"),
        (some[None], {}, "not a list of ids"),
        (some.float(), {}, "not a list of ids"),
        (some[:0], {}, "not a list of ids"),
    ):
        save_file({"tokens": tokens}, path, metadata=right | metadata)
        raises_line(load_datastore, ValueError, message, path, 61, "t")
    path.write_bytes(b"text")
    raises_line(load_datastore, ValueError, "is no datastore, or is damaged", path, 61, "t")
    raises_line(load_datastore, FileNotFoundError, "no datastore at", tmp_path / "none", 61, "t")


def test_a_drafts_datastore_is_found_where_it_is_for_the_same_vocabulary(tmp_path):
    target, draft, find = WEIGHTS / "mini-7b", tmp_path / "draft", datastore.find_datastore
    own, drafts = (folder / datastore.DATASTORE for folder in (tmp_path, draft))
    config, right = read_config(target), tokenizer_checksum(target)
    for size, tokenizer, fits in ((1024, "other", 0), (1000, right, 0), (1024, right, 1)):
        write_datastore(drafts, [[5, 6]], 2, size, tokenizer, "text", replace=True)
        assert find(target, draft, config) == (drafts if fits else None)
    assert find(target, tmp_path / "none", config) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    message = "tokenizer.json is not a tokenizer that is known here; download it again"
    raises_line(find, ValueError, message, tmp_path, draft, config)
    write_datastore(own, [[5]], 2, 1024, "other", "text")  # a target's own
    assert find(tmp_path, draft, config) == own


def test_what_a_datastore_is_not_made_of(asking, capsys):
    weights, config = asking / "base/model.safetensors", asking / "base/tokenizer_config.json"
    before = weights.read_bytes()
    (asking / "latin.txt").write_bytes(b"\xe4")
    (asking / "empty.txt").write_text(" \n")
    config.write_text("{}")
    for message, *more in (
        ("and no datastore", "--millions", "1", "--out", weights, "--replace"),
        ("No such file", "--from", asking / "none.txt"),
        ("is no text in UTF-8", "--from", asking / "latin.txt"),
        ("holds no text", "--from", asking / "empty.txt"),
        ("expected more than 0", "--millions", "0"),
        ("one of the arguments --millions --from is required",),
        ("needs a chat template of its own", "--millions", "1"),
    ):
        assert_refused(capsys, message, make, asking, *more)
    assert weights.read_bytes() == before and not (asking / "base/datastore.self.jsonl").exists()
