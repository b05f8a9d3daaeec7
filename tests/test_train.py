"""Training: it learns, it resumes, and a nested draft comes out as an ordinary folder with exits."""

import json
import random
import re
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import WEIGHTS, random_llama, run_and_kill

from s2d import load_model
from s2d.files import former_of, stage_of
from s2d.model import Llama
from s2d.tokenizer import Tokenizer
from s2d.train import __main__ as train
from s2d.train import dialogues, family, fit, nested
from s2d.train.soft import Distillation, soft_losses
from s2d.weights import save_model


@pytest.fixture
def tiny(tmp_path, tokenizer):
    """A folder with a small random Llama and the miniature tokenizer."""
    model = random_llama(0, scale=0.1, vocab_size=tokenizer.vocab_size, max_position_embeddings=64)
    save_model(model, tmp_path / "base", dtype=torch.float32)
    (tmp_path / "base/tokenizer.model").write_bytes(tokenizer.model.pieces.serialized_model_proto())
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
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "base",
        "draft",
    ]  # no checkpoint is left
    tokenizer = Tokenizer(tiny / "tokenizer.model")
    tokens, labels = dialogues.pack(
        dialogues.corpus_dialogues(9), tokenizer, 20, 48, answers_only=True
    )
    with torch.no_grad():
        before = soft_losses(load_model(tiny, num_layers=3), tokens, labels, (1, 2, 3))
        after = soft_losses(draft, tokens, labels, (1, 2, 3))
    assert (after < before - 0.5).all()


ROWS = torch.randint(0, 61, (40, 16), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(
    torch.rand(40, 16, generator=torch.Generator().manual_seed(2)) < 0.4,
    -100,
    ROWS.roll(-1, dims=1),
)
RECIPE = fit.Recipe(batch=4, micro_batch=4, length=16, lr=1e-3, epochs=2)


def losses_of(checkpoint, resume=False, stop_after=None, **changes):
    """Losses of a small training, one (2,) for each step."""
    model = random_llama(2, scale=0.1).float().requires_grad_(True)
    losses = []
    for step, loss in fit.fit(
        model, (2, 4), ROWS, LABELS, replace(RECIPE, **changes), checkpoint, resume
    ):
        losses.append(loss.tolist())
        if step == stop_after:
            break
    return losses


def test_resume_gives_the_same_losses(tmp_path, monkeypatch):
    """Stop in the middle of each epoch, go on from the checkpoint: every later loss equals the uninterrupted run's."""
    whole = losses_of(tmp_path / "a.checkpoint")
    assert len(whole) == 20 and whole[-1][1] < whole[0][1]
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)  # after every step
    for stop_after in (6, 13):
        checkpoint = tmp_path / f"{stop_after}.checkpoint"
        assert losses_of(checkpoint, stop_after=stop_after) == whole[:stop_after]
        assert losses_of(checkpoint, resume=True) == whole[stop_after:]


def test_a_kill_between_the_two_renames_of_a_checkpoint_loses_nothing(tmp_path, monkeypatch):
    whole = losses_of(tmp_path / "a.checkpoint")
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)
    losses_of(tmp_path / "b.checkpoint", stop_after=6)
    (tmp_path / "b.checkpoint").rename(former_of(tmp_path / "b.checkpoint"))
    assert losses_of(tmp_path / "b.checkpoint", resume=True) == whole[6:]


def test_a_checkpoint_is_resumed_only_by_the_training_it_belongs_to(tmp_path, monkeypatch):
    """Whatever changes the losses is named; how the work is divided may change. Without --resume nothing is lost."""
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)
    checkpoint = tmp_path / "a.checkpoint"
    whole = losses_of(checkpoint, stop_after=6)
    with pytest.raises(
        ValueError, match="is of a training that was cut short; go on with --resume, or remove it"
    ):
        losses_of(checkpoint)

    def resumed(
        model=None, rows=ROWS, labels=LABELS, exits=(2, 4), seed=0, distillation=None, **changes
    ):
        model = model or random_llama(2, scale=0.1).float().requires_grad_(True)
        training = fit.fit(
            model,
            exits,
            rows,
            labels,
            replace(RECIPE, **changes),
            checkpoint,
            True,
            seed,
            distillation,
        )
        return next(training)[0]

    teacher = Distillation(random_llama(3).float(), "forward", 1.0)
    for change, message in (
        (dict(rows=ROWS.flip(0)), "data"),
        (dict(labels=LABELS.flip(0)), "data"),
        (dict(seed=1), "seed 0, not 1"),
        (dict(batch=8), "batch 4, not 8"),
        (dict(epochs=3), "epochs 2, not 3"),
        (dict(lr=2e-3), "lr 0.001, not 0.002"),
        (dict(exits=(1, 4)), r"exits \[2, 4\], not \[1, 4\]"),
        (dict(distillation=teacher), "teacher None, not"),
        (dict(model=random_llama(5, scale=0.1).float().requires_grad_(True)), "model"),
    ):
        with pytest.raises(ValueError, match=f"is of another training: {message}") as caught:
            resumed(**change)
        assert "\n" not in str(caught.value)
    assert len(whole) == 6 and resumed(micro_batch=2, recompute=True) == 7


def test_a_step_without_labels_teaches_nothing(tmp_path):
    model = random_llama(2, scale=0.1).float().requires_grad_(True)
    nothing = torch.full_like(ROWS, -100)
    losses = [
        loss for _, loss in fit.fit(model, (2, 4), ROWS, nothing, RECIPE, tmp_path / "a.checkpoint")
    ]
    assert torch.stack(losses).eq(0).all() and all(
        parameter.isfinite().all() for parameter in model.parameters()
    )


def test_micro_batches_and_recomputation_change_nothing_but_memory(tmp_path):
    """Rows have different numbers of labels: a loss that is averaged for each micro-batch would differ."""
    exact = {"bf16": False}
    whole = torch.tensor(losses_of(tmp_path / "a", **exact))
    assert (
        torch.tensor(losses_of(tmp_path / "b", micro_batch=1, **exact)) - whole
    ).abs().max() < 1e-5
    assert (
        torch.tensor(losses_of(tmp_path / "c", recompute=True, **exact)) - whole
    ).abs().max() < 1e-6


def test_every_epoch_sees_every_row_in_an_order_of_its_own():
    order = fit.row_order(10, 3, seed=0).view(3, 10)
    assert order[0].tolist() == list(range(10))
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in order)
    assert order[1].tolist() != order[2].tolist()


def test_labels_are_the_assistants_words(tokenizer):
    messages = ["Hi there", "Hello Anna", "How are you?", "Fine"]
    ids, is_answer = dialogues.encode_dialogue(tokenizer, messages)
    assert ids == tokenizer.encode_chat(messages[:3]) + tokenizer.encode("Fine")[1:] + [
        tokenizer.eos_id
    ]
    learnt = [token for token, answer in zip(ids, is_answer) if answer]
    eos = tokenizer.eos_id
    assert learnt == tokenizer.encode("Hello Anna")[1:] + [eos] + tokenizer.encode("Fine")[1:] + [
        eos
    ]
    tokens, labels = dialogues.pack([messages] * 3, tokenizer, 99, 10, answers_only=True)
    flat, used = tokens.flatten().tolist(), tokens.numel()
    assert flat == (ids * 3)[:used]
    following = zip((ids * 3)[1:], (is_answer * 3)[1:])
    assert (
        labels.flatten().tolist()
        == [token if answer else -100 for token, answer in following][:used]
    )


def turn(speaker, text):
    return {"from": speaker, "value": text}


def test_sharegpt_records(tmp_path):
    """Dialogues come out; what is none is counted with its reason."""
    records = [
        {"id": "x", "conversations": [turn("human", "a"), turn("gpt", "b"), turn("human", "c")]},
        {"conversations": [turn("gpt", "x"), turn("human", "d"), turn("gpt", "é\n]}")]},
        {"conversations": [turn("gpt", "x"), turn("human", "y")]},
        {"conversations": []},
        {"conversations": [turn("human", "x"), turn("human", "y")]},
        {"conversations": [turn("system", "x"), turn("human", "y"), turn("gpt", "z")]},
        {"conversations": [turn("human", "x"), turn("gpt", " ")]},
        {"conversations": [turn("human", "x"), turn("gpt", None)]},
        {"conversations": [{"from": "human"}, turn("gpt", "y")]},
        {"conversations": None},
        {"text": "x"},
        "not a record",
    ]
    skipped = Counter()
    for indent in (None, 2):
        (tmp_path / "d.json").write_text(
            json.dumps(records, indent=indent, ensure_ascii=False), encoding="utf-8"
        )
        for block in (1, 7, 2**20):
            skipped.clear()
            read = [item for item in dialogues._json_list(tmp_path / "d.json", block)]
            assert read == records
        assert list(dialogues.read_sharegpt(tmp_path / "d.json", skipped)) == [
            ["a", "b"],
            ["d", "é\n]}"],
        ]
        assert skipped == {
            "no question with an answer": 2,
            "human and gpt do not take turns": 2,
            "a message without text": 2,
            "not a list of conversations with from and value": 4,
        }


def test_sharegpt_is_not_read_all_at_once(tmp_path):
    """The first dialogues come while most of the file is unread: what follows them is not even JSON."""
    record = {"conversations": [turn("human", "x" * 1000), turn("gpt", "y" * 1000)]}
    text = "[" + ", ".join([json.dumps(record)] * 2000)
    (tmp_path / "d.json").write_text(text + ", {broken")
    reader = dialogues.read_sharegpt(tmp_path / "d.json", Counter())
    assert len([next(reader) for _ in range(2000)]) == 2000
    with pytest.raises(ValueError, match="is not ShareGPT JSON"):
        next(reader)


def test_soft_on_sharegpt_data(tiny, tmp_path, capsys):
    record = {"conversations": [turn("human", "Hello"), turn("gpt", "Good morning " * 40)]}
    (tmp_path / "d.json").write_text(json.dumps([record, {}] * 5))
    assert soft(tiny, tmp_path / "draft", "--data", str(tmp_path / "d.json")) == 0
    said = capsys.readouterr().err
    assert "records passed over: 5 (not a list of conversations" in said
    tokenizer = Tokenizer(tiny / "tokenizer.model")
    rows, _ = dialogues.pack(
        [["Hello", "Good morning " * 40]] * 5, tokenizer, None, 48, answers_only=True
    )
    assert (
        int(re.search(r"step (\d+)/\1 ", said)[1]) == len(rows) * 3 // 4
    )  # three epochs by default
    assert load_model(tmp_path / "draft").config.exit_layers == (1, 2, 3)


def test_killed_training_never_leaves_a_folder_that_loads(tiny, tmp_path, monkeypatch):
    """SIGKILL at random, resume, and again: nothing loads until it is done, and then it is what one run gives."""
    monkeypatch.setattr(
        fit, "CHECKPOINT_SECONDS", -1
    )  # after every step, so that most kills hit one

    def arguments(name):
        return ["soft", "--init", str(tiny), "--layers", "2", "--exits", "1,2", "--out", str(tmp_path / name),
                "--length", "32", "--millions", "0.004", "--resume"]  # fmt: skip

    def run(seconds, name):
        return run_and_kill(seconds, train.main, arguments(name))

    rng, needed, killed = random.Random(0), min(run(60, "whole"), run(60, "again")), 0
    for _ in range(60):
        run(rng.uniform(0, needed / 2), "draft")
        if (tmp_path / "draft").is_dir():
            break
        killed += 1
        for name in ("draft", stage_of(tmp_path / "draft").name):
            with pytest.raises((FileNotFoundError, ValueError)):
                load_model(tmp_path / name)
    run(60, "draft")
    assert killed > 1
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "draft" / file.name).read_bytes() == file.read_bytes()


def test_user_errors(tiny, tmp_path, capsys):
    (tmp_path / "bad.json").write_text('{"not": "a list"}')
    (tmp_path / "few.json").write_text("[]")
    (tmp_path / "nested.json").write_text("[" * 200_000)
    save_model(random_llama(0, vocab_size=1024, max_position_embeddings=40), tmp_path / "short")
    for arguments, message in (
        (["--data", str(tmp_path / "bad.json")], "is not ShareGPT JSON"),
        (["--data", str(tmp_path / "few.json")], "gives 0 rows"),
        (["--data", str(tmp_path / "none.json")], "No such file"),
        (["--exits", "0,3"], "lie within the draft's 3 layers"),
        (["--layers", "7", "--exits", "2,7"], "cannot keep the first 7 of 4 layers"),
        (["--init", str(tmp_path / "nowhere")], "no model folder"),
        (["--micro-batch", "3"], "a batch of 4 rows cannot be divided among 1 processes by 3 rows"),
        (["--epochs", "0"], "must be positive"),
        (["--teacher", str(tmp_path / "nowhere")], "no model folder"),
        (["--exits", "1,2"], "the last exit must be the last of the 3 layers"),
        (["--length", "65"], "rows of 65 tokens are longer than the context of"),
        (
            ["--teacher", str(tmp_path / "short")],
            "rows of 48 tokens are longer than the context of",
        ),
        (["--data", str(tmp_path / "nested.json")], "is not ShareGPT JSON"),
    ):
        assert soft(tiny, tmp_path / "draft", *arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "draft").exists()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for taken in (
        tmp_path,
        tmp_path / "bad.json",
    ):  # asked before any work: the data are not even read
        assert (
            train.main(
                [
                    "soft",
                    "--init",
                    str(tiny),
                    "--layers",
                    "3",
                    "--exits",
                    "1,2,3",
                    "--out",
                    str(taken),
                ]
            )
            == 2
        )
        error = capsys.readouterr().err
        assert "name another" in error and error.count("\n") == 1, error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_soft_takes_the_template_of_the_model(tiny, tmp_path, monkeypatch):
    """A Llama-2 folder's dialogues are packed with [INST]; what is learnt is what the model is to write after it."""
    tiny = tiny.rename(tiny.with_name("Llama-2-tiny-chat"))
    packed = []
    monkeypatch.setattr(
        nested,
        "train_and_save",
        lambda model, exits, tokens, labels, *_: packed.append((tokens, labels)),
    )
    (tmp_path / "d.json").write_text(
        json.dumps([{"conversations": [turn("human", "Hi"), turn("gpt", "Yes. ")] * 9}])
    )
    assert soft(tiny, tmp_path / "draft", "--data", str(tmp_path / "d.json"), "--length", "20") == 0
    tokenizer = Tokenizer(tiny / "tokenizer.model")
    [(tokens, labels)] = packed
    assert (
        tokens.flatten().tolist()
        == tokenizer.encode_chat(["Hi", "Yes. "] * 8 + ["Hi"], "llama-2")[: tokens.numel()]
    )
    one = tokenizer.encode_chat(["Hi", "Yes. ", "Hi"], "llama-2")
    answer = one[
        len(tokenizer.encode_chat(["Hi"], "llama-2")) : -len(
            tokenizer.encode_chat(["Hi"], "llama-2")
        )
    ]
    learnt = [label for label in labels.flatten().tolist() if label != -100]
    assert learnt[: 2 * len(answer)] == answer * 2 and tokenizer.decode(answer) == "Yes. "


def test_an_early_mistake_in_a_large_file_is_found_at_once(tmp_path):
    """And a long item is not copied again and again: time grows with the length, not with its square."""
    (tmp_path / "d.json").write_text('[{"a": nonsense}, "' + "x" * 20_000_000)
    began = time.monotonic()
    with pytest.raises(ValueError, match="is not ShareGPT JSON"):
        list(dialogues._json_list(tmp_path / "d.json", 2**10))
    assert time.monotonic() - began < 1.0
    (tmp_path / "d.json").write_text(json.dumps([{"a": "x" * 20_000_000}]))
    assert len(next(dialogues._json_list(tmp_path / "d.json", 2**10))["a"]) == 20_000_000
    assert time.monotonic() - began < 10.0


def test_miniature_shapes_have_the_stated_proportions():
    counts = {}
    for name, (config, *_) in family.TARGETS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in Llama(config).parameters())
    with torch.device("meta"):
        draft_config = replace(family.TARGETS["mini-7b"][0], num_hidden_layers=family.DRAFT_LAYERS)
        counts["mini-draft"] = sum(p.numel() for p in Llama(draft_config).parameters())
    rounded = {name: round(count / 1e6, 1) for name, count in counts.items()}
    assert rounded == {"mini-7b": 3.4, "mini-13b": 6.1, "mini-70b": 14.4, "mini-draft": 1.6}


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_copying_start(kv_heads):
    """Before any training, what stands in the prompt is about one standard deviation likelier than what does not."""
    order = torch.randperm(family.VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).view(
        16, 64
    )
    with torch.inference_mode():
        logits = family.initialise(family.shape(8, 128, 4, kv_heads), 1, copying=True)(order)[
            :, -1
        ]  # (16, V)
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, True)
    logits, earlier = (
        logits / logits.std(),
        seen.scatter(1, order[:, -1:], False),
    )  # the last token itself apart
    assert logits[earlier].mean() > logits[~seen].mean() + 0.5


def test_mini_makes_the_whole_family(tmp_path, monkeypatch, capsys):
    """The command that made weights/, on smaller shapes: every member loads, a second run with --resume keeps all."""
    small = family.shape(5, 64, 2, 1)
    monkeypatch.setattr(
        family, "TARGETS", {name: (small, 0.01, 1e-3, True) for name in family.TARGETS}
    )
    monkeypatch.setattr(family, "DRAFT_TOKENS", 0.01)
    assert train.main(["mini", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mini-13b",
        "mini-70b",
        "mini-7b",
        "mini-draft",
    ]
    for name in family.TARGETS:
        assert load_model(tmp_path / name).config == small
    draft = load_model(tmp_path / "mini-draft")
    assert draft.config.exit_layers == (2, 3, 4) and draft.config.num_hidden_layers == 4
    shipped = (WEIGHTS / "mini-7b/tokenizer.model").read_bytes()
    assert (tmp_path / "mini-draft/tokenizer.model").read_bytes() == shipped
    capsys.readouterr()
    assert train.main(["mini", "--out", str(tmp_path), "--resume"]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "mini-70b" / "notes.txt").write_text(
        "mine"
    )  # in the way of the last member: said before the first
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert train.main(["mini", "--out", str(tmp_path)]) == 2
    assert "mini-70b is not empty and holds what was not written here" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
