"""Training: the loop next to a plain one, alone and divided, resumed; commands and their data."""

import json
import math
import os
import shutil
import zlib
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import WEIGHTS, blocks, change_json, fork, program, raises_line, random_llama, refuses

from s2d import Tokenizer, load_model
from s2d.checkpoint.files import taken
from s2d.checkpoint.save import save_model
from s2d.passes.processes import join_processes
from s2d.soft import exit_states, soft_losses
from s2d.train import __main__ as train
from s2d.train import data, family, fit, nested
from s2d.train.fit import Divided


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def losses_in_float64(model, tokens, labels, exits):
    """As ``soft_losses``. AdamW makes much of small gradients, and so of rounding in float32."""
    labels = labels.flatten().long()
    states = exit_states(model, tokens, exits)
    logits = [model.logits(each).flatten(0, 1) for each in states]
    return torch.stack([F.cross_entropy(each, labels, reduction="sum") for each in logits])


ROWS = torch.randint(0, 61, (24, 16), generator=seeded(1), dtype=torch.int32)
LABELS = ROWS.roll(-1, dims=1).where(torch.rand(24, 16, generator=seeded(2)) > 0.4, -100)
RECIPE = fit.Recipe(8, 8, 16, lr=5e-3, epochs=2, exits=(1, 3), weights=(1.0, 3.0))
RECIPE = replace(RECIPE, loss=losses_in_float64)


def student(**changes):
    model = random_llama(2, scale=0.1, num_hidden_layers=3, **changes)
    return model.requires_grad_(True)


@pytest.fixture(autouse=True)
def no_bfloat16(monkeypatch):
    monkeypatch.setattr(fit, "is_fast", lambda dtype, device: False)


def losses_of(out, model=None, stop_after=None, rows=ROWS, labels=LABELS, **changes):
    """Losses (6, E) of a training of 6 steps, or of those that are left."""
    divided = model if isinstance(model, Divided) else Divided(model or student())
    training = fit.fit(divided, (rows, labels), replace(RECIPE, **changes), fit.Run(out))
    return torch.stack(list(islice(training, stop_after)))


def test_the_loop_beside_a_plain_one(tmp_path):
    """AdamW, warm-up and cosine, clipping, an order of rows per epoch, the mean over all labels."""
    plain = student()
    trained = student()
    expected = []
    orders = [torch.arange(24), torch.randperm(24, generator=seeded(0))]
    decay, rest = ([p for p in plain.parameters() if (p.dim() > 1) == d] for d in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, batch in enumerate(torch.cat(orders).split(8)):
        labels, own = LABELS[batch].long(), []
        for exit in RECIPE.exits:  # each from a pass of its own
            logits = plain.logits(plain.run_layers(plain.embed(ROWS[batch].long()), 0, exit))
            own.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / 6)) / 2)
        optimizer.zero_grad()
        (0.25 * own[0] + 0.75 * own[1]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        expected.append(torch.stack(own).detach())
    losses = losses_of(tmp_path / "a", trained)
    assert (losses - torch.stack(expected)).abs().max() < 1e-5  # they are not weighed
    lines = map(json.loads, (tmp_path / "a.losses.jsonl").read_text().splitlines())
    assert [[*line["losses"].values()] for line in lines] == losses.tolist()
    for one, other in zip(plain.parameters(), trained.parameters()):
        assert (one - other).abs().max() < 1e-8
    rising = [fit.warm_up_and_cosine(step, 100, 1.0) for step in range(5)]
    assert rising == pytest.approx([0.25, 0.5, 0.75, 1, 1], abs=4e-3)


def test_functions_of_ones_own(tmp_path):
    """A part of the loss at a higher learning rate. Epochs are drawn when they are reached."""
    sgd = dict(make_optimizer=lambda model, decay: torch.optim.SGD(model.parameters()), epochs=1)
    found = []
    for scale in (64, 128):
        model = student()
        loss = lambda *inputs: soft_losses(*inputs) / scale  # noqa: B023, E731
        schedule = lambda step, steps, lr: scale * lr  # noqa: B023, E731
        losses = losses_of(tmp_path / f"{scale}", model, loss=loss, schedule=schedule, **sgd)
        found.append([scale * losses, *model.parameters()])
    assert all(map(torch.equal, *found)) and (losses[0] > losses[-1]).all()
    assert len(losses_of(tmp_path / "c", stop_after=1, epochs=10**12)) == 1


tied = partial(student, tie_word_embeddings=True)


@pytest.mark.parametrize("stop_after, make", [(2, tied), (4, student)])
def test_resumed_is_as_uninterrupted(tmp_path, monkeypatch, stop_after, make):
    """To the last bit, in each epoch; only with what it was begun with. No bad step is saved."""
    trained = make()
    whole = losses_of(tmp_path / "whole", trained)
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)  # after every step
    run = fit.Run(tmp_path / "run")
    losses_of(run.out, make(), stop_after)
    kept = shutil.copy(run.unfinished, tmp_path / "kept")
    refused = partial(raises_line, losses_of, ValueError)
    others = dict(lr=1e-3, init="b", data="b", teacher="b", weights=(1.0, 2.0), loss=sum)
    for name, value in others.items():
        refused(f"was begun with another {name}", run.out, make(), **{name: value})
    for name, value in {"rows": ROWS.flip(0), "labels": LABELS.flip(0)}.items():
        refused("was begun with another content", run.out, make(), **{name: value})
    again = make()
    assert torch.equal(losses_of(run.out, again), whole[stop_after:])
    assert run.losses.read_text() == (tmp_path / "whole.losses.jsonl").read_text()
    for one, other in zip(again.parameters(), trained.parameters()):
        assert torch.equal(one, other)
    shutil.copy(kept, run.unfinished)
    message = f"the loss of step {stop_after + 1} is not finite; try a lower --lr"
    refused(message, run.out, make(rms_norm_eps=math.nan))
    assert len(torch.load(run.unfinished)[0]["log"]) == stop_after


def test_functions_are_told_from_others_in_a_later_run(tmp_path, monkeypatch, capsys):
    """A partial by its arguments, a closure by what it holds. A lambda is always another one."""

    def make(scale):
        def loss(*inputs):
            return scale * soft_losses(*inputs)

        return loss

    some = make(1), make(2), partial(make, 1), partial(make, 2), partial(make, scale=2)
    assert len({*map(fit.describe, some)}) == 5 and fit.describe(make(2)) in map(fit.describe, some)
    monkeypatch.setattr(fit, "CHECKPOINT_SECONDS", -1)
    begin = partial(losses_of, tmp_path / "a", loss=partial(lambda *inputs: soft_losses(*inputs)))
    begin(stop_after=1)
    assert "the loss has no name of its own" in capsys.readouterr().err
    raises_line(begin, ValueError, "was begun with another loss")


def test_two_processes_give_the_losses_of_one(tmp_path):
    """In micro-batches; resumed, by one process, too; each rank holds half of the weights."""
    model = tied()
    alone = losses_of(tmp_path / "alone", model)
    assert fork(tmp_path, 2, train_on_every_rank, tmp_path / "two") == [0, 0]
    losses, weights, held = torch.load(tmp_path / "found")
    assert (losses - alone).abs().max() < 1e-5
    for name, parameter in model.named_parameters():
        assert (weights[name] - parameter).abs().max() < 1e-8
    assert held < 0.55 * sum(parameter.numel() for parameter in model.parameters())
    later = losses_of(tmp_path / "two", tied(), micro_batch=4)
    assert len(later) == 1 and (later - alone[5:]).abs().max() < 1e-5  # after the fifth step


def train_on_every_rank(out):
    join_processes()
    fit.CHECKPOINT_SECONDS = -1 if os.environ["RANK"] == "0" else 1e9  # rank 0's clock counts
    losses = losses_of(out, tied(), micro_batch=4, stop_after=5)
    fit.CHECKPOINT_SECONDS = 1e9
    dist.barrier()  # until rank 0 has written it
    again = Divided(tied())
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


SOFT = "soft --init TMP/base --out TMP/draft --length 48 --batch 4 --exits 1,2,3"


def test_soft_makes_a_draft_whose_thresholds_are_measured(tiny, tmp_path, monkeypatch):
    """By two processes, with a teacher: on a twentieth of the rows, of which nothing is learnt."""
    monkeypatch.setattr(nested, "FEWEST", 150)
    monkeypatch.setattr(nested, "save_model", partial(save_model, dtype=torch.float32))
    sums = "".join(f"{number} and {number + 1} make {2 * number + 1}. " for number in range(300))
    asked = [dict(role="user", content="Add."), dict(role="assistant", content=sums)]
    (tmp_path / "sums.json").write_text(json.dumps({"messages": asked}))
    change_json(tiny / "config.json", eos_token_id=0)
    some = "--data TMP/sums.json --lr 1e-2 --epochs 1 --micro-batch 2 --teacher TMP/base"
    line = f"{SOFT} {some}".replace("TMP", str(tmp_path))
    assert fork(tmp_path, 2, train.main, line.split()) == [0, 0]
    error = (tmp_path / "err").read_text()
    draft = load_model(tmp_path / "draft", quick=False)
    thresholds = draft.drafting["thresholds"]
    assert 0.02 < min(thresholds[:2]) and thresholds[2] == 0
    ids = torch.tensor([Tokenizer(tiny).encode_chat(asked)])
    rows = (ids.shape[1] - 1) // 48
    learnt = rows - rows // 20
    held_out = [each[:, 48 * learnt : 48 * rows].view(-1, 48) for each in (ids, ids[:, 1:])]
    measured = nested.measure_thresholds(draft, held_out, (1, 2, 3))
    assert measured == pytest.approx(thresholds, abs=2e-3)
    assert f"exits (1, 2, 3), thresholds {thresholds}, measured on " in error
    assert "sums.json: no answer ends with an EOS" in error
    assert f"learnt from {learnt} rows with " in error
    losses = soft_losses(draft, ids[:, 200:240], ids[:, 201:241], (1, 2, 3)) / 40
    assert (losses < 4).all()  # a guess has 6.9
    assert not list(tmp_path.glob("*.checkpoint"))


def test_thresholds():
    """Where an exit errs from 0.65 on, is as good as the last, or knows nothing; of few rows."""
    confidence = 1 - torch.randperm(1000, generator=seeded(0)) / 1000
    last, few = (confidence > 0.1005).float(), (confidence > 0.95).float()
    right = last * ((confidence > 0.6505) | (confidence < 0.5))
    for found, at_last, expected in (
        (right, last, 0.642),
        (last, last, 0.001),
        (0 * last, last, 0.992),
        (0 * few, few, 1.0),
    ):
        threshold = nested.lowest_threshold(confidence, found, at_last)
        assert threshold == pytest.approx(expected)
    for count, batch, expected in ((2000, 4, 64), (1000, 4, 50), (1000, 980, 20)):
        rows = torch.arange(count)
        learnt, held_out = nested.hold_out((rows, rows), batch)
        assert len(held_out[0]) == len(held_out[1]) == expected
        assert torch.equal(torch.cat((learnt[0], held_out[0])), rows)


MISTAKES = """
--data TMP/bad.json | bad.json cannot be read: Expecting ',' delimiter in line 3; expected one list
--data TMP/lists.jsonl | lists.jsonl cannot be read: Extra data in line 2; expected one list, or an
--data TMP/none.json | no dialogue that can be learnt: the role 'GPT' is none of
--data TMP/few.json | 0 rows of 48 tokens, and a batch has 4; give more text, or a smaller
--epochs 1000000000000 | argument --epochs: expected a number from 1 to
--millions 1e303 | argument --millions: expected a number from 1e-09
--weights 1,2 | --weights: expected one for each of 3 exits
--align 2 | --align is about the features of a --teacher
--exits 2,7 | base has 4 layers, not 7
--teacher TMP/other | --teacher: it has another vocabulary than the draft
--length 65 | context of 64 tokens; give --length 64
--out TMP/base | base is there already
--out TMP/held | held is being written by another program
--out /proc/draft | /proc/draft cannot be written
--out TMP/cut | is no checkpoint, or is damaged
"""


def test_user_errors(tiny, tmp_path, capsys):
    (tmp_path / "bad.json").write_text('\n{}\n{"not": "a list"\n{}')
    (tmp_path / "none.json").write_text(json.dumps(record("x", "y", speakers=("human", "GPT"))))
    (tmp_path / "few.json").write_text(json.dumps(record("x", "Yes. " * 9)))
    (tmp_path / "lists.jsonl").write_text('[{"role": "user"}]\n[]')
    (tmp_path / "cut.checkpoint").write_text("")
    save_model(random_llama(0), tmp_path / "other")
    for line in MISTAKES.strip().split("\n"):
        whole = f"{SOFT} --millions 0.01 {line}".replace("TMP", str(tmp_path))
        arguments, message = whole.split(" | ")
        with taken(tmp_path / "held"):
            refuses(train.main, capsys, message, *arguments.split())
    assert not [*tmp_path.glob("draft*"), *tmp_path.glob(".*")]


def test_rows_are_dialogues_end_to_end():
    """The example of the docstring; a row without a label is left out."""
    rounds = [([1, 2], [3, 4]), ([5], [6, 7]), ([8, 9, 8, 9], [1])]
    tokens, labels = data.make_rows([rounds], batch=1, length=3, millions=0.3)
    assert tokens.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert labels.tolist() == [[-100, 3, 4], [-100, 6, 7]]
    assert len(data.make_rows([rounds], batch=1, length=3, millions=1e-9)[0]) == 1


def test_a_label_ends_where_an_answer_does(tiny, tmp_path, monkeypatch, capsys):
    """At an EOS of the model, also where the tokenizer's is another. Without one, that is said.

    A teacher has another name if its folder has other weights.
    """
    [stop] = Tokenizer(tiny).encode(".", with_bos=False)[-1:]
    learnt = []
    monkeypatch.setattr(nested, "fit", lambda _, *given: learnt.append(given) or [])
    for eos, name in ((stop, "a"), (1023, "b")):
        change_json(tiny / "config.json", eos_token_id=eos)
        save_model(random_llama(eos, vocab_size=1024), tmp_path / name / "teacher")
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / name / "teacher")
        some = f"--millions 0.003 --teacher TMP/link --out TMP/{name}/draft"
        line = f"{SOFT} {some}".replace("TMP", str(tmp_path))
        assert program(train.main, *line.split()) == 0
    assert capsys.readouterr().err.count("no answer ends with an EOS") == 1
    assert learnt[0][1].teacher != learnt[1][1].teacher
    labels = learnt[0][0][1]
    after = labels[:, 1:][labels[:, :-1] == stop]
    assert len(after) > 20 and (after == -100).all()


def test_the_python_that_is_shown(tmp_path, monkeypatch):
    """Both drafts are written; smaller than shown."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("s2d/train/README.md"):
        exec(block.replace("millions=0.5", "millions=0.005"), {})
    names = load_model("draft").drafting, load_model("own-draft").drafting
    assert [each["exits"] for each in names] == [(2, 3, 4)] * 2 and "thresholds" in names[1]


def test_the_rows_are_those_that_the_shipped_draft_learnt_from(tokenizer):
    """To the last token, or it could not be made again."""
    dialogues = data.read_dialogues("mini", data.read_records("mini", 1), tokenizer)
    tokens, labels = data.make_rows(dialogues, batch=4, length=256, millions=0.2)
    content = tokens.numpy().tobytes() + labels.numpy().tobytes()
    assert len(tokens) == 780 and f"{zlib.crc32(content):08x}" == "8a639f08"


def record(*texts, speakers=("human", "gpt") * 2):
    return {"conversations": [{"from": each, "value": t} for each, t in zip(speakers, texts)]}


NAMED = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
# Each is right by itself, or passed over and counted.
GOOD = [record("a", "b", "c"), record("d", "é\u2028]}"), {"messages": NAMED}]
GOOD.append(record("system", "user", "assistant", speakers=("system", "human", "gpt")))
GOOD.append(record("user", "assistant") | {"system": "system"})
GOOD += [record("", "e", speakers=("human", "gpt")), record("f", "g") | {"tools": "[]"}]
LOST = [dict(role="assistant", content="l", **{name: False}) for name in ("loss", "train")]
GOOD += [{"messages": [NAMED[1], lost, *NAMED[1:]]} for lost in LOST]
NONE = [record("x", None), "not a record", {"messages": []}, record("no answer")]
NONE += [record("half a character", "\ud800"), record("x", "y") | {"tools": ["z"]}]
TURNS = ["gpt human", "human gpt gpt", "system gpt", "human bing"]
NONE += [record("x", "y", "z", speakers=speakers.split()) for speakers in TURNS]


def test_records_are_learnt_or_counted(tokenizer, tmp_path, capsys):
    """As one list or one in each line; also if a reader stops."""
    lost = [NAMED[1], LOST[0] | {"weight": 0}, *NAMED[1:]]
    expected = [["a", "b"], ["d", "é\u2028]}"], ["", "e"], ["f", "g"], lost, lost, *[NAMED] * 3]
    expected = sorted(list(data.as_rounds(tokenizer, each)) for each in expected)
    lines = [json.dumps(each, ensure_ascii="ud800" in repr(each)) for each in GOOD + NONE]
    file = tmp_path / "d.json"
    for content in (json.dumps(GOOD + NONE), "\n\n".join(lines)):
        file.write_text(content, encoding="utf-8")
        records = data.read_records(str(file), 0)
        found = list(data.read_dialogues("d", records, tokenizer))
        assert sorted(found) == expected
        told = f"{len(NONE)} records are passed over; of the first, "
        assert told in capsys.readouterr().err
        whole = data.read_dialogues("d", records, tokenizer, answers_only=False)
        for [(prompt, said)] in found[:2]:
            assert next(whole) == [([], prompt + said)]
        whole.close()
        [_, second, *_] = [number for number, each in enumerate(records) if each in GOOD]
        assert f" {second - 1} records are passed over" in capsys.readouterr().err


def test_each_turn_is_encoded_once(tokenizer, monkeypatch):
    """So the time grows with the turns. Not where a token goes on after an answer's end."""
    encode = tokenizer.encode_rendered
    sizes = []
    sums = []
    counted = lambda text: sizes.append(len(text)) or encode(text)  # noqa: E731
    monkeypatch.setattr(tokenizer, "encode_rendered", counted)
    for turns in (10, 40):
        assert len(data.as_rounds(tokenizer, ["And why?", "Because it is so."] * turns)) == turns
        sums.append(sum(sizes))
    assert sums[1] < 6 * sums[0]
    with pytest.warns(UserWarning, match="each turn is encoded with all before it"):
        data.as_rounds(tokenizer, ["Why?", "Because.\n\n"] * 3, ["."])


def test_mini_makes_the_whole_family(tmp_path, monkeypatch, tokenizer):
    """The command that made weights/, smaller: every member loads."""
    small = family.make_config(5, 64, 2, 1)
    recipes = {name: replace(each, exits=(4,)) for name, each in family.RECIPES.items()}
    monkeypatch.setattr(family, "RECIPES", recipes)
    monkeypatch.setattr(family, "CONFIGS", dict.fromkeys(recipes, small))
    assert program(train.main, "mini", "--out", tmp_path, "--millions", "0.002") == 0
    draft = replace(small, num_hidden_layers=4)
    found = {name: load_model(tmp_path / name) for name in recipes}
    configs = {name: model.config for name, model in found.items()}
    assert configs == dict.fromkeys(recipes, small) | {"mini-draft": draft}
    assert found["mini-draft"].drafting == family.DRAFTING and not found["mini-7b"].drafting
    text = "What is 3 + 4? <s> Zwölf</s>"
    assert tokenizer.encode(text) == Tokenizer(tmp_path / "mini-draft").encode(text)
