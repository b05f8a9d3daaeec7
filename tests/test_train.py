"""Training: the loop next to a plain one, alone and divided, resumed; commands and their data."""

import json
import math
import os
import shutil
import signal
import zlib
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from helpers import WEIGHTS, fork, program, raises_line, random_llama, refuses

from s2d import Tokenizer, load_model
from s2d.checkpoint import save_model
from s2d.model import Drafting
from s2d.soft import soft_losses
from s2d.speed.tensor_parallel import join_processes
from s2d.train import __main__ as train
from s2d.train import data, family, fit, nested, thresholds
from s2d.train.fsdp import Divided
from s2d.train.teacher import Teacher


def seeded(seed):
    return torch.Generator().manual_seed(seed)


ROWS = torch.randint(0, 61, (24, 16), generator=seeded(1), dtype=torch.int32)
LABELS = ROWS.roll(-1, dims=1).where(torch.rand(24, 16, generator=seeded(2)) > 0.4, -100)
RECIPE = fit.Recipe(batch=8, micro_batch=8, length=16, lr=5e-3, epochs=2)
EXITS = (1, 3)


def student(seed=2):
    return random_llama(seed, scale=0.1, num_hidden_layers=3).float().requires_grad_(True)


@pytest.fixture(autouse=True)
def all_in_float32(monkeypatch):
    monkeypatch.setattr(fit, "is_fast", lambda dtype, device: False)


def losses_of(out, model=None, stop_after=None, rows=ROWS, teacher=None, **changes):
    """Losses (6, E) of a training of 6 steps, or of those that are left."""
    divided = model if isinstance(model, Divided) else Divided(model or student())
    recipe = replace(RECIPE, **changes)
    training = fit.fit(divided, EXITS, (rows, LABELS), recipe, fit.Run(out), teacher)
    return torch.stack(list(islice(training, stop_after)))


def test_the_loop_beside_a_plain_one(tmp_path):
    """AdamW, warm-up and cosine, clipping, an order of rows per epoch, the mean over all labels."""
    plain, trained, expected = student(), student(), []
    orders = [torch.arange(24), torch.randperm(24, generator=seeded(0))]
    decay, rest = ([p for p in plain.parameters() if (p.dim() > 1) == d] for d in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, batch in enumerate(torch.cat(orders).split(8)):
        labels, own = LABELS[batch].long(), []
        for exit in EXITS:  # each from a pass of its own
            logits = plain.logits(plain.run_layers(plain.embed(ROWS[batch].long()), 0, exit))
            own.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / 6)) / 2)
        optimizer.zero_grad()
        torch.stack(own).mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        expected.append(torch.stack(own).detach())
    losses = losses_of(tmp_path / "a", trained)
    assert (losses - torch.stack(expected)).abs().max() < 1e-5
    assert losses[-1, 1] < losses[0, 1] - 0.1
    assert (losses_of(tmp_path / "b", micro_batch=2) - losses).abs().max() < 1e-5
    for one, other in zip(plain.parameters(), trained.parameters()):
        assert (one - other).abs().max() < 1e-5
    rising = [fit.learning_rate(step, 100, 1.0) for step in range(5)]
    assert rising == pytest.approx([0.25, 0.5, 0.75, 1, 1], abs=4e-3)


def test_a_resumed_training_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, monkeypatch):
    """Stopped in each epoch, to the last bit; only with what it was begun with."""
    trained = student()
    whole = losses_of(tmp_path / "whole", trained)
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)  # after every step
    for stop_after in (2, 4):
        run = fit.Run(tmp_path / f"{stop_after}")
        losses_of(run.out, stop_after=stop_after)
        others = [dict(lr=1e-3), dict(rows=ROWS.flip(0)), dict(model=student(seed=3))]
        for change in (*others, dict(teacher=Teacher(student()))):
            raises_line(losses_of, ValueError, "was begun with other", run.out, **change)
        kept = shutil.copy(run.unfinished, tmp_path / "kept")
        found = losses_of(run.out, micro_batch=4)  # which changes nothing but rounding
        assert (found - whole[stop_after:]).abs().max() < 1e-5
        shutil.copy(kept, run.unfinished)
        again = student()
        assert torch.equal(losses_of(run.out, again), whole[stop_after:])
        for one, other in zip(again.parameters(), trained.parameters()):
            assert torch.equal(one, other)


def test_what_is_saved_when_a_training_ends_early(tmp_path, monkeypatch, capsys):
    """At Ctrl-C the step that was begun, too; never a step whose loss is not finite."""
    run = fit.Run(tmp_path / "a")
    training = fit.fit(Divided(student()), EXITS, (ROWS, LABELS), RECIPE, run)
    next(training)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(training)
    assert "a.checkpoint is written; go on with --resume" in capsys.readouterr().err
    assert torch.load(run.unfinished)[0]["step"] == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)  # after every step
    model = student()
    training = fit.fit(Divided(model), EXITS, (ROWS, LABELS), RECIPE, run)
    next(training)
    model.lm_head.weight.data[0, 0] = math.nan
    raises_line(next, ValueError, "the loss of step 4 is not finite", training)
    assert torch.load(run.unfinished)[0]["step"] == 3


def test_two_processes_give_the_losses_of_one(tmp_path):
    """Killed and resumed by one process, too; each rank holds half of the weights."""
    model = student()
    alone = losses_of(tmp_path / "alone", model)
    assert fork(tmp_path, 2, train_on_every_rank, tmp_path / "two") == [0, 0]
    losses, weights, held = torch.load(tmp_path / "found")
    assert (losses - alone).abs().max() < 1e-5
    for name, parameter in model.named_parameters():
        assert (weights[name] - parameter).abs().max() < 1e-4
    assert held < 0.55 * sum(weight.numel() for weight in weights.values())
    later = losses_of(tmp_path / "two", micro_batch=4)  # from the checkpoint after step 5
    assert len(later) == 1 and (later - alone[5:]).abs().max() < 1e-5


def train_on_every_rank(out):
    join_processes()
    fit.CHECKPOINT_SECONDS = -1 if os.environ["RANK"] == "0" else 1e9  # rank 0's clock counts
    losses = losses_of(out, micro_batch=4, stop_after=5)
    fit.CHECKPOINT_SECONDS = 1e9
    again = Divided(student())
    whole = losses_of(out, again, micro_batch=4)
    held = sum(parameter.to_local().numel() for parameter in again.parameters())
    if weights := again.gather():
        torch.save((torch.cat([losses, whole]), weights, held), out.with_name("found"))


@pytest.fixture
def tiny(tmp_path):
    """A folder with a small random Llama and the miniature tokenizer."""
    model = random_llama(0, scale=0.1, vocab_size=1024, max_position_embeddings=64)
    save_model(model, tmp_path / "base", WEIGHTS / "mini-7b", torch.float32)
    return tmp_path / "base"


def soft(folder, out, *more):
    """The arguments of a small training."""
    options = "--length 48 --batch 4 --exits 1,2,3".split()
    return ["soft", "--init", folder, "--out", out, *options, *more]


def test_soft_makes_a_draft_that_has_learnt(tiny, tmp_path, capsys):
    """With a teacher, in micro-batches; no checkpoint is left."""
    some = ["--millions", "0.004", "--lr", "3e-3", "--teacher", tiny, "--micro-batch", 2]
    assert program(train.main, *soft(tiny, tmp_path / "draft", *some)) == 0
    draft, before = load_model(tmp_path / "draft", quick=False), nested.cut(tiny, 3, "cpu")
    # Too little text to measure thresholds.
    assert draft.config.drafting == Drafting((1, 2, 3), (0.5, 0.5, 0.0))
    assert "exit 1:" in capsys.readouterr().err
    pairs = data.read_pairs("mini", 9, Tokenizer(tiny), True)
    rows = data.make_rows(pairs, batch=8, length=16, millions=0.001)
    with torch.no_grad():
        losses = [soft_losses(each, *rows, (1, 2, 3)) for each in (before, draft)]
    count = (rows[1] != -100).sum()
    assert (losses[1] / count < losses[0] / count - 0.2).all()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "draft"}


def test_thresholds_are_measured_on_text_that_was_held_out(tiny, tmp_path):
    """By two processes. The config has them; every token of a plain text is learnt."""
    text = "".join(f"{number} and {number + 1} make {2 * number + 1}. " for number in range(1300))
    (tmp_path / "sums.txt").write_text(text)
    line = ["--data", tmp_path / "sums.txt", "--lr", "3e-3", "--epochs", 1]
    line = list(map(str, soft(tiny, tmp_path / "draft", "--micro-batch", 2, *line)))
    assert fork(tmp_path, 2, train.main, line) == [0, 0]
    error = (tmp_path / "err").read_text()
    drafting = load_model(tmp_path / "draft").config.drafting
    first, second, last = drafting.thresholds
    assert 0 < first < 1 and 0 < second < 1 and last == 0 and 0.5 not in (first, second)
    rows = (len(Tokenizer(tiny).encode(text)) - 1) // 48
    learnt = rows - rows // 20
    assert f"exits (1, 2, 3), thresholds ({first}, {second}, 0.0)" in error
    assert f"it learnt {48 * learnt} tokens of {learnt} rows, 1 times" in error


def test_an_exit_loses_a_hundredth_of_what_the_last_exit_gets_right():
    """If it errs from 0.65 on; if it is as good; if it knows nothing, also of few tokens."""
    confidence = 1 - torch.randperm(1000, generator=seeded(0)) / 1000
    last, few = confidence > 0.1005, confidence > 0.95
    right = last & ((confidence > 0.6505) | (confidence < 0.5))
    for found, at_last, expected in (
        (right, last, 0.642),
        (last, last, 0.001),
        (0 * last, last, 0.992),
        (0 * last, few, 1.0),
    ):
        threshold = thresholds.lowest_threshold(confidence, found.float(), at_last.float())
        assert threshold == pytest.approx(expected)


def test_a_twentieth_of_the_rows_is_held_out():
    """At most 64, of which none is learnt; and a batch is left to learn."""
    for count, batch, expected in ((2000, 4, 64), (1000, 4, 50), (1000, 980, 20)):
        rows = torch.arange(count * 4).view(count, 4)
        learnt, held_out = thresholds.hold_out((rows, rows), batch)
        assert len(held_out[0]) == len(held_out[1]) == expected
        assert torch.equal(torch.cat((learnt[0], held_out[0])), rows)


MISTAKES = """
--data TMP/bad.json | is not JSON
--data TMP/few.txt | there are 0 rows of 48 tokens; a batch needs 4
--align 2 | --align is about the features of a --teacher; give both
--exits 2,7 | base has 4 layers, not 7
--teacher TMP/other | has another vocabulary than the draft
--length 65 | has a context below 65 tokens; give --length
--micro-batch 3 | --batch is no multiple of --micro-batch times the processes
--out TMP/base | base is there already
--out TMP/cut | give --resume if TMP/cut.checkpoint is there
--out TMP/cut --resume | cut.checkpoint is no checkpoint, or is damaged
"""


def test_user_errors(tiny, tmp_path, capsys):
    (tmp_path / "bad.json").write_text('{"not": "a list"')
    (tmp_path / "few.txt").write_text("A few words.")
    (tmp_path / "cut.checkpoint").write_text("")
    save_model(random_llama(0), tmp_path / "other")
    for line in MISTAKES.strip().split("\n"):
        arguments, message = line.replace("TMP", str(tmp_path)).split(" | ")
        more = ["--millions", "0.01", *arguments.split()]
        refuses(train.main, capsys, message, *soft(tiny, tmp_path / "draft", *more))
    assert not list(tmp_path.glob("draft*"))


def test_rows_are_dialogues_end_to_end():
    """The example of the docstring; a row without a label is left out."""
    pairs = [([1, 2], [3, 4]), ([5], [6, 7]), ([8, 9, 8, 9], [1])]
    tokens, labels = data.make_rows(pairs, batch=1, length=3)
    assert tokens.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert labels.tolist() == [[-100, 3, 4], [-100, 6, 7]]


def test_the_rows_are_those_that_the_shipped_draft_learnt_from(tokenizer):
    """To the last token, or it could not be made again."""
    pairs = data.read_pairs("mini", 1, tokenizer, True)
    tokens, labels = data.make_rows(pairs, batch=4, length=256, millions=0.05)
    content = tokens.numpy().tobytes() + labels.numpy().tobytes()
    assert len(tokens) == 196 and f"{zlib.crc32(content):08x}" == "230ab6f6"


def record(*texts, speakers=("human", "gpt") * 2):
    return {"conversations": [{"from": each, "value": t} for each, t in zip(speakers, texts)]}


def test_records_that_are_dialogues(tokenizer, tmp_path, capsys):
    """ShareGPT's and those with roles, as one list or one in each line; others are counted."""
    named = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    dialogues = [["a", "b"], ["d", "é\u2028]}"], named]
    records = [record("a", "b", "c"), record("d", "é\u2028]}")]
    records.append(record("system", "user", "assistant", speakers=("system", "human", "gpt")))
    none = [record("x", None), "not a record", {"messages": []}]
    none.append(record("x", "y", speakers=("gpt", "human")))
    none.append(record("half a character", "\ud800"))
    lines = [json.dumps(each, ensure_ascii="ud800" in repr(each)) for each in records + none]
    expected = sorted(list(data.as_rounds(tokenizer, each)) for each in dialogues)
    file = tmp_path / "d.json"
    for content in (json.dumps(records + none), "\n\n".join(lines)):
        file.write_text(content, encoding="utf-8")
        found = list(data.read_pairs(str(file), 0, tokenizer, answers_only=True))
        assert sorted([pair] for pair in found) == expected
        whole = list(data.read_pairs(str(file), 0, tokenizer, answers_only=False))
        assert whole == [([], prompt + answer) for prompt, answer in found]
        assert f"{len(none)} records are passed over; of the first, " in capsys.readouterr().err


def test_mini_makes_the_whole_family(tmp_path, monkeypatch, tokenizer):
    """The command that made weights/, smaller: every member loads."""
    small, out = family.make_config(5, 64, 2, 1), tmp_path / "family"
    members = {name: family.Miniature(small, 0.003, 1e-3, True) for name in family.MEMBERS}
    monkeypatch.setattr(family, "MEMBERS", members)
    assert program(train.main, "mini", "--out", out, "--millions", "0.002") == 0
    drafts = replace(small, num_hidden_layers=4, drafting=family.DRAFTING)
    for name in members:
        assert load_model(out / name).config == (drafts if name == "mini-draft" else small)
    assert {path.name for path in out.iterdir()} == set(members)
    text = "What is 3 + 4? <s> Zwölf</s>"
    assert tokenizer.encode(text) == Tokenizer(out / "mini-draft").encode(text)
