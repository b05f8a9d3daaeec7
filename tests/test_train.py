"""Training: it learns, it resumes, and a nested draft comes out as a folder with exits."""

import json
import random
from dataclasses import replace
from itertools import islice

import pytest
import torch
from helpers import (
    WEIGHTS,
    assert_refused,
    contents,
    program,
    raises_line,
    random_llama,
    run_and_kill,
)

from s2d import load_model
from s2d.files import former_of, stage_of
from s2d.soft import soft_losses
from s2d.text.tokenizer import Tokenizer
from s2d.train import __main__ as train
from s2d.train import dialogues, family, fit, nested
from s2d.train.distil import Distillation
from s2d.weights import save_model


@pytest.fixture
def tiny(tmp_path):
    """A folder with a small random Llama and the miniature tokenizer."""
    model = random_llama(0, scale=0.1, vocab_size=1024, max_position_embeddings=64)
    save_model(model, tmp_path / "base", WEIGHTS / "mini-7b", torch.float32)
    return tmp_path / "base"


def soft(folder, out, *more):
    arguments = ["--length", "48", "--batch", "4", "--layers", "3", "--exits", "1,2,3", *more]
    return program(train.main, "soft", "--init", folder, "--out", out, *arguments)


def test_soft_makes_a_draft_that_has_learnt(tiny, tmp_path, capsys):
    assert soft(tiny, tmp_path / "draft", "--millions", "0.02", "--lr", "3e-3") == 0
    draft = load_model(tmp_path / "draft")
    assert draft.config.exit_layers == (1, 2, 3) and draft.config.thresholds == (0.5, 0.5, 0.0)
    assert draft.config.num_hidden_layers == 3
    progress = capsys.readouterr().err
    assert all(said in progress for said in ("exit 1:", "tokens/s", "min left"))
    assert {path.name for path in tmp_path.iterdir()} == {"base", "draft"}  # no checkpoint is left
    some = dialogues.dialogues_of("mini", 9)
    tokens, labels = dialogues.pack(some, Tokenizer(tiny), 20, 48, True)
    with torch.no_grad():
        before = soft_losses(load_model(tiny, num_layers=3), tokens, labels, (1, 2, 3))
        after = soft_losses(draft, tokens, labels, (1, 2, 3))
    assert (after < before - 0.5).all()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


ROWS = torch.randint(0, 61, (24, 16), generator=seeded(1))
LABELS = ROWS.roll(-1, dims=1).where(torch.rand(24, 16, generator=seeded(2)) > 0.4, -100)
RECIPE = fit.Recipe(batch=4, micro_batch=4, length=16, lr=1e-3, epochs=2)


def student(seed=2):
    return random_llama(seed, scale=0.1).float().requires_grad_(True)


def losses_of(out, resume=False, stop_after=None, **changes):
    """Losses of a small training of 12 steps, one (2,) for each."""
    run, recipe = fit.Run(out, resume=resume), replace(RECIPE, **changes)
    training = fit.fit(student(), (2, 4), (ROWS, LABELS), recipe, run)
    return [loss.tolist() for _, loss in islice(training, stop_after)]


def test_resume_gives_the_same_losses(tmp_path, monkeypatch):
    """Stopped in each epoch, or killed between a checkpoint's renames: the same later losses."""
    whole = losses_of(tmp_path / "whole")
    assert len(whole) == 12 and whole[-1][1] < whole[0][1]
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)  # after every step
    for stop_after in (4, 8):
        out = tmp_path / f"{stop_after}"
        assert losses_of(out, stop_after=stop_after) == whole[:stop_after]
        if stop_after == 8:
            fit.checkpoint_of(out).rename(former_of(fit.checkpoint_of(out)))
        assert losses_of(out, resume=True) == whole[stop_after:]


def test_a_checkpoint_is_resumed_only_by_the_training_it_belongs_to(tmp_path, monkeypatch):
    """What changes the losses is named; how the work is divided may change. Nothing is lost."""
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)
    whole = losses_of(tmp_path / "a", stop_after=6)
    message = "was cut short; go on with --resume, or remove it"
    raises_line(losses_of, ValueError, message, tmp_path / "a")

    def resumed(model=2, rows=ROWS, labels=LABELS, exits=(2, 4), seed=0, teacher=None, **changes):
        run, recipe = fit.Run(tmp_path / "a", seed=seed, resume=True), replace(RECIPE, **changes)
        return next(fit.fit(student(model), exits, (rows, labels), recipe, run, teacher))[0]

    teacher = Distillation(random_llama(3).float(), "forward")
    changes = dict(seed=1, batch=8, epochs=3, lr=2e-3, exits=(1, 4), teacher=teacher, model=5)
    messages = ["seed 0, not 1", "batch 4, not 8", "epochs 2, not 3", "lr 0.001, not 0.002"]
    messages += [r"exits \[2, 4\], not \[1, 4\]", "teacher None, not", "model"]
    changes = [{name: value} for name, value in changes.items()]
    changes += [dict(rows=ROWS.flip(0)), dict(labels=LABELS.flip(0))]
    for change, message in zip(changes, [*messages, "data", "data"]):
        raises_line(resumed, ValueError, f"is of another training: {message}", **change)
    assert len(whole) == 6 and resumed(micro_batch=2, recompute=True) == 7


def test_micro_batches_and_recomputation_change_nothing_but_memory(tmp_path):
    """Rows have different numbers of labels: averaging over each micro-batch would differ."""

    changes = {}, {"micro_batch": 1}, {"recompute": True}
    whole, small, again = (
        torch.tensor(losses_of(tmp_path / f"{change}", bf16=False, **change)) for change in changes
    )
    assert (small - whole).abs().max() < 1e-5 and (again - whole).abs().max() < 1e-6


def test_every_epoch_sees_every_row_in_an_order_of_its_own():
    first, second, third = fit.row_order(10, 3, seed=0).view(3, 10).tolist()
    assert first == sorted(second) == sorted(third) == list(range(10)) and second != third


@pytest.mark.parametrize("template, space", [("vicuna", ""), ("llama-2", " ")])
def test_labels_are_the_assistants_words(template, space, tokenizer):
    """And what the template puts behind them in the assistant's turn."""
    messages, eos = ["Hi there", "Hello Anna", "How are you?", "Fine"], [tokenizer.eos_id]
    hello, fine = (tokenizer.encode(text + space)[1:] + eos for text in ("Hello Anna", "Fine"))
    ids, is_answer = dialogues.encode_dialogue(tokenizer, messages, template)
    assert ids == tokenizer.encode_chat(messages[:3], template) + fine
    assert [token for token, answer in zip(ids, is_answer) if answer] == hello + fine
    tokens, labels = dialogues.pack([messages] * 3, tokenizer, 99, 10, True, template)
    used = tokens.numel()
    assert tokens.flatten().tolist() == (ids * 3)[:used]
    learnt = [token if answer else -100 for token, answer in zip(ids * 3, is_answer * 3)]
    assert labels.flatten().tolist() == learnt[1 : used + 1]


def record(*texts, first=0):
    """A ShareGPT record in which the two speakers take turns."""
    speakers = (("human", "gpt") * len(texts))[first:]
    return {"conversations": [{"from": each, "value": t} for each, t in zip(speakers, texts)]}


def test_sharegpt_records(tmp_path, capsys):
    records = [{"id": "x", **record("a", "b", "c")}, record("x", "d", "é\n]}", first=1)]
    records += [record("x", "y", first=1), record(), record("x", " "), record("x", None)]
    records += [{"conversations": None}, {"text": "x"}, "not a record"]
    human, gpt, system = ({"from": name, "value": "x"} for name in ("human", "gpt", "system"))
    others = [[human, human], [{"from": "human"}, gpt], [system, human, gpt]]
    records += [{"conversations": other} for other in others]
    counts = "4 (not a list of conversations with from and value), 2 (no question with an answer), "
    counts += "2 (a message without text), 2 (human and gpt do not take turns)"
    file = tmp_path / "d.json"
    for indent in (None, 2):
        file.write_text(json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8")
        assert list(dialogues.read_sharegpt(file)) == [["a", "b"], ["d", "é\n]}"]]
        assert capsys.readouterr().err == f"records passed over: {counts}\n"


def test_killed_training_never_leaves_a_folder_that_loads(tiny, tmp_path, monkeypatch):
    """SIGKILL at random, again and again: nothing loads before it is what one run gives."""
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)  # most kills hit a checkpoint

    def run(seconds, name):
        options = "--layers 2 --exits 1,2 --length 32 --millions 0.002 --resume"
        return run_and_kill(seconds, soft, tiny, tmp_path / name, *options.split())

    rng, needed, killed = random.Random(0), min(run(60, "whole"), run(60, "again")), 0
    for _ in range(60):
        run(rng.uniform(0, needed / 2), "draft")
        if (tmp_path / "draft").is_dir():
            break
        killed += 1
        for name in ("draft", stage_of(tmp_path / "draft").name):
            raises_line(load_model, (FileNotFoundError, ValueError), ".", tmp_path / name)
    run(60, "draft")
    assert killed > 1
    assert contents(tmp_path / "draft") == contents(tmp_path / "whole")


MISTAKES = """
--data TMP/bad.json | is not ShareGPT JSON
--data TMP/few.json | gives 0 rows
--data TMP/none.json | No such file
--data TMP/nested.json | is not ShareGPT JSON
--exits 0,3 | exits must increase within the draft's 3 layers
--exits 1,2 | exits must increase within the draft's 3 layers and end with the last
--exits 2,1,3 | exits must increase within the draft's 3 layers
--layers 7 --exits 2,7 | cannot keep the first 7 of 4 layers
--exits a,b | --exits: invalid comma-separated int value: 'a,b'
--seed -1 | --seed: a whole number from 0 to 2^63 - 1, not -1
--seed 9223372036854775808 | --seed: a whole number from 0
--teacher= | --teacher: invalid path value
--init TMP/nowhere | no model folder
--teacher TMP/nowhere | no model folder
--teacher TMP/short | rows of 48 tokens are longer than the context of
--length 65 | rows of 65 tokens are longer than the context of
--micro-batch 3 | a batch of 4 rows cannot be divided among 1 processes by 3 rows
--out TMP/base --replace | base would replace TMP/base, which is read
--out TMP/base --lora 2 --replace | base would replace TMP/base, which is read
--out TMP/short --teacher TMP/short --replace | which is read
--out TMP/few.json --data TMP/few.json | which is read
--text TMP/draft/in/it | which is read
--epochs 0 | must be positive
--lr inf | must be positive
"""


def test_user_errors(tiny, tmp_path, capsys):
    texts = {"bad": '{"not": "a list"}', "few": "[]", "nested": "[" * 200_000}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    save_model(random_llama(0, vocab_size=1024, max_position_embeddings=40), tmp_path / "short")
    for line in MISTAKES.strip().split("\n"):
        arguments, message = line.replace("TMP", str(tmp_path)).split(" | ")
        more = ["--millions", "0.01", *arguments.split()]
        assert_refused(capsys, message, soft, tiny, tmp_path / "draft", *more)
    assert not (tmp_path / "draft").exists()
    (tmp_path / "draft.checkpoint").mkdir()
    (tmp_path / "draft.checkpoint/mine").write_text("mine")
    before = contents(tmp_path)
    for way in ("--resume", "--replace"):
        message = "draft.checkpoint is in the way, and no checkpoint that was written here"
        assert_refused(capsys, message, soft, tiny, tmp_path / "draft", way)
    for taken in (tmp_path, tmp_path / "bad.json"):  # asked before any work
        assert_refused(capsys, "name another", soft, tiny, taken)
    assert contents(tmp_path) == before


def test_soft_takes_the_template_of_the_model(tiny, tmp_path):
    """A Llama-2 folder's dialogues have [INST]."""
    tiny, texts = tiny.rename(tiny.with_name("Llama-2-tiny-chat")), ["Hi", "Yes. "] * 9
    (tmp_path / "d.json").write_text(json.dumps([record(*texts)]))
    found = nested.rows_of(tiny, tmp_path / "d.json", fit.Run(tmp_path), replace(RECIPE, length=20))
    expected = dialogues.pack([texts], Tokenizer(tiny), None, 20, True, "llama-2")
    assert len(found[0]) > 4 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_copying_start(kv_heads):
    """Untrained, words of the prompt are about one standard deviation likelier than others."""
    order = torch.randperm(family.VOCAB_SIZE, generator=seeded(0)).view(16, 64)
    model = family.initialise(family.shape(8, 128, 4, kv_heads), 1, copying=True)
    with torch.inference_mode():
        logits = model(order)[:, -1]  # (16, V)
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, True)
    earlier = seen.scatter(1, order[:, -1:], False)  # without the last token itself
    assert logits[earlier].mean() - logits[~seen].mean() > 0.5 * logits.std()


def test_mini_makes_the_whole_family(tmp_path, monkeypatch, capsys):
    """The command that made weights/, smaller: every member loads; --resume keeps all."""
    small = family.shape(5, 64, 2, 1)
    targets = {name: (small, 0.003, 1e-3, True) for name in family.TARGETS}
    monkeypatch.setattr(family, "TARGETS", targets)
    monkeypatch.setattr(family, "DRAFT_TOKENS", 0.003)
    assert train.main(["mini", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {*family.TARGETS, "mini-draft"}
    for name in family.TARGETS:
        assert load_model(tmp_path / name).config == small
    draft = load_model(tmp_path / "mini-draft")
    assert draft.config.exit_layers == (2, 3, 4) and draft.config.num_hidden_layers == 4
    shipped = (WEIGHTS / "mini-7b/tokenizer.model").read_bytes()
    assert (tmp_path / "mini-draft/tokenizer.model").read_bytes() == shipped
    capsys.readouterr()
    assert train.main(["mini", "--out", str(tmp_path), "--resume"]) == 0
    assert capsys.readouterr().err == ""
    # In the way of the last member: said before the first is trained.
    (tmp_path / "mini-70b" / "notes.txt").write_text("mine")
    before, message = contents(tmp_path), "mini-70b is in the way, and no model that was written"
    assert_refused(capsys, "there already", train.main, ["mini", "--out", str(tmp_path)])
    assert_refused(capsys, message, train.main, ["mini", "--out", str(tmp_path), "--replace"])
    assert contents(tmp_path) == before
