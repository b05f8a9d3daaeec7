"""Text that a model samples from itself, and what is made of it: drafts and datastores."""

import os
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
from helpers import WEIGHTS, assert_refused, change_json, program
from safetensors.torch import load_file

from s2d import Tokenizer, generate, load_model
from s2d.decision import load_decision
from s2d.train import __main__ as train
from s2d.train import decision, fit, nested, self_text
from s2d.train.dialogues import Counts

TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}USER: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %} SO:{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A copy of mini-7b with a chat template by which it can ask itself, briefly."""
    folder = tmp_path_factory.mktemp("self") / "base"
    shutil.copytree(WEIGHTS / "mini-7b", folder)
    change_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_text, "QUESTION_TOKENS", 48)
        patch.setattr(self_text, "ANSWER_TOKENS", 20)
        yield folder


def sample(tokenizer, millions, run):
    return self_text.sample(self_text.find_ways_to_ask(tokenizer), tokenizer, millions, run)


def test_the_model_asks_and_answers(base, tmp_path):
    """Every question begins as the template and phrases.txt say, and ends; answers are its own."""
    beginnings, after = self_text.find_ways_to_ask(Tokenizer(base))
    pairs, counts = sample(Tokenizer(base), 0.0002, fit.Run(tmp_path / "a", seed=1))
    model = load_model(base)
    assert 6 < len(pairs) == counts.dialogues == 20 - counts.passed_over.total()
    flat = [tuple(each) for kind in beginnings for each in kind]
    for prompt, answer in pairs:
        assert any(tuple(prompt[: len(each)]) == each for each in flat)
        assert prompt[-len(after) :] == after and prompt.count(model.config.eos_token_ids[0]) == 1
        assert len(answer) == 20 or answer[-1] in model.config.eos_token_ids
    assert len({tuple(prompt) for prompt, _ in pairs}) > 0.8 * len(pairs)
    greedy = [generate(model, p, method="ar", max_new_tokens=20).tokens == a for p, a in pairs]
    third = len(pairs) // 3
    assert all(greedy[:third]) and not all(greedy[-third:])  # T = 0 first, T = 1 last


def test_a_draft_learns_only_answers_of_its_own_text(base, tmp_path, monkeypatch):
    pairs = [([1, 5, 6], [7, 8, 9, 2]), ([1, 30], [31, 2])] * 20
    monkeypatch.setattr(
        nested, "sample", lambda ways, tokenizer, millions, run: (pairs, Counts(""))
    )
    options = "--layers 2 --exits 1,2 --data self --length 20 --batch 2 --micro-batch 2 --epochs 1"
    out = tmp_path / "draft"
    assert program(train.main, "soft", "--init", base, "--out", out, *options.split()) == 0
    assert load_model(out).drafting.exits == (1, 2) and decision.read_data_of(out) == "self"
    recipe = fit.Recipe(batch=2, micro_batch=2, length=20, lr=1e-3)
    (tokens, labels), _ = nested.make_rows(Tokenizer(base), "self", fit.Run(out), recipe, 1)
    assert tokens.flatten().tolist()[:11] == [1, 5, 6, 7, 8, 9, 2, 1, 30, 31, 2]
    assert labels.flatten().tolist()[:10] == [-100, -100, 7, 8, 9, 2, -100, -100, 31, 2]


def test_a_decision_model_for_a_draft_of_its_own_text(base, tmp_path, monkeypatch, capsys):
    """The target asks itself again, and other questions; what it drafts for are short answers."""
    monkeypatch.setattr(decision, "start", partial(decision.start, max_new_tokens=12))
    ways, model = self_text.find_ways_to_ask(Tokenizer(base)), load_model(base)
    (tmp_path / "learnt").mkdir()
    learnt_from, _ = self_text.ask(ways, model, 9, 0, tmp_path / "learnt")
    shutil.rmtree(tmp_path / "learnt")
    questions, _ = decision.find_questions(base, model, "self", 9, seed=0)
    assert questions and questions != learnt_from
    draft, out = tmp_path / "draft", tmp_path / "d.safetensors"
    shutil.copytree(WEIGHTS / "mini-draft", draft)
    change_json(draft / "config.json", learnt_from="self")
    line = ["--target", base, "--draft", draft, "--out", out, "--prompts", 14, "--epochs", 1]
    assert program(train.main, "decision", *line) == 0
    assert "learnt from self, 1 times" in capsys.readouterr().err
    assert load_decision(out).features == "stats" and len(os.listdir(tmp_path)) == 2


def test_what_was_written_is_kept_and_resumed(base, tmp_path):
    """Cut short in the middle of a line, while it asks and while it answers."""
    tokenizer, whole_run = Tokenizer(base), fit.Run(tmp_path / "whole", seed=1)
    whole = sample(tokenizer, 0.0001, whole_run)
    files = sorted(whole_run.unfinished.glob("*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 4
    for number, file in enumerate(files):
        run = fit.Run(tmp_path / f"cut-{number}", seed=1, resume=True)
        shutil.copytree(whole_run.unfinished, run.unfinished)
        for later in files[number:]:
            (run.unfinished / later.name).unlink()
        lines = file.read_text().split("\n")
        (run.unfinished / file.name).write_text("\n".join(lines[:2]) + "\n" + lines[2][:9])
        assert sample(tokenizer, 0.0001, run) == whole
        for each in files:
            assert (run.unfinished / each.name).read_bytes() == each.read_bytes()
    (run.unfinished / file.name).write_text("5\n")
    with pytest.raises(ValueError, match="jsonl is damaged"):
        sample(tokenizer, 0.0001, run)
    with pytest.raises(ValueError, match="was begun with .* not"):
        sample(tokenizer, 0.0001, replace(run, seed=2))


def test_answers_that_are_there_are_not_replaced(base, tmp_path, capsys):
    """But gone on with; and when a datastore is made of them, they go."""
    line = "--millions", "0.00005", "--out", tmp_path / "d.safetensors"
    run = fit.Run(tmp_path / "d.safetensors")
    sample(Tokenizer(base), 0.00005, run)
    assert_refused(capsys, "go on with --resume, or remove it", make, base, *line)
    assert make(base, *line, "--resume") == 0
    assert os.listdir(tmp_path) == ["d.safetensors"]


def make(folder, *more):
    return program(train.main, "text", "--target", folder, "--device", "cpu", *more)


def read_datastore(file):
    return load_file(file)["tokens"].tolist()


def test_a_datastore_of_a_models_answers(base, tmp_path):
    """Every answer after the template's words and before an EOS."""
    assert make(base, "--millions", "0.00005", "--out", tmp_path / "new/d.safetensors") == 0
    expected, (_, after) = [], self_text.find_ways_to_ask(Tokenizer(base))
    assert os.listdir(tmp_path / "new") == ["d.safetensors"]
    pairs, _ = sample(Tokenizer(base), 0.00005, fit.Run(tmp_path / "again"))
    for _, answer in pairs:
        expected += after[1:] + answer + [2] * (answer[-1] != 2)
    assert read_datastore(tmp_path / "new/d.safetensors") == expected


def test_why_a_datastore_is_smaller_than_asked_for(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(self_text, "QUESTION_TOKENS", 30)
    out = tmp_path / "d.safetensors"
    assert make(base, "--millions", "0.0001", "--out", out) == 0
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"fewer than 100: \d of 10 questions .* within 30 tokens", told), told
    monkeypatch.setattr(self_text, "QUESTION_TOKENS", 1)
    assert_refused(capsys, "no question", make, base, "--millions", "0.0001", "--out", out)


def test_a_datastore_of_any_text(tmp_path, capsys):
    """Files are documents. The default file is not replaced; one that the user names is."""
    (tmp_path / "a.txt").write_text("The capital of Tadastan.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Zwölf Boxkämpfer\n", encoding="utf-8")
    shutil.copytree(WEIGHTS / "mini-7b", folder := tmp_path / "mini-7b")
    tokenizer, files = Tokenizer(folder), [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert make(folder, "--from", *files) == 0
    a, b = (tokenizer.encode(file.read_text("utf-8")) for file in files)
    [own] = set(folder.glob("*datastore*")) | set(tmp_path.glob("*datastore*"))
    assert read_datastore(own) == [*a, 2, *b, 2]
    capsys.readouterr()
    assert_refused(capsys, "is there already", make, folder, "--from", *files)
    assert make(folder, "--from", files[1], "--out", own) == 0
    assert read_datastore(own) == [*b, 2]
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    (tmp_path / "pad.txt").write_text("What is [PAD]?")
    (folder / "added_tokens.json").write_text('{"[PAD]": 1024}')
    capsys.readouterr()
    out = "--out", tmp_path / "none"
    for message, *more in (
        ("No such file", "--from", tmp_path / "none.txt"),
        ("is not in UTF-8", "--from", tmp_path / "latin.txt"),
        ("has the token 1024", "--from", tmp_path / "pad.txt"),
        ("one of the arguments --millions --from is required",),
        ("has no chat template to ask itself", "--millions", "1"),
    ):
        assert_refused(capsys, message, make, folder, *out, *more)
    assert not (tmp_path / "none").exists()
