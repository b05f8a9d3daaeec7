"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import json
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
from helpers import ROOT, WEIGHTS, change_json, program, raises_line, refuses

from s2d.bench import __main__ as bench
from s2d.bench import compare, measure, methods, peers, specbench, tables
from s2d.bench.measure import Record, Turn
from s2d.decoder import Stats
from s2d.train import corpus

SMALL = "--target 7b --limit 1 --rounds 1 --max-new-tokens 4".split()


@pytest.fixture
def questions(tmp_path):
    """A file of two, one of two turns."""
    one = {"question_id": 7, "category": "qa", "turns": ["What is the capital of Tadastan?"]}
    two = {"question_id": 9, "category": "coding", "turns": ["Give me 3 tips.", "And the first?"]}
    file = tmp_path / "few.jsonl"
    file.write_text(json.dumps(one) + "\n" + json.dumps(two) + "\n", encoding="utf-8")
    return file


def test_default_questions_are_held_out():
    held_out = next(corpus.conversations(2, "held-out", ["rag"]))
    question = {"question_id": 15, "category": "rag", "group": "rag"}
    question["turns"] = [turn for turn, _ in held_out]
    assert specbench.corpus_questions(3)[-3] == question


def test_a_file_in_spec_benchs_form_is_read(tmp_path):
    # JSON leaves these characters as they are; they end no line of the file.
    good = {"question_id": 2, "category": "roleplay", "turns": ["a\u2028line\x85still", "b"]}
    file = tmp_path / "q.jsonl"
    line = json.dumps(good | {"more": 0}, ensure_ascii=False)
    file.write_text(f"{line}\n \n{line}\r\n\n", encoding="utf-8")
    assert specbench.read_questions(file, 1) == [good | {"group": "mt_bench"}]
    for bad in ("no json", json.dumps(good | {"turns": "abc"})):
        file.write_text(bad)
        raises_line(specbench.read_questions, ValueError, "not in Spec-Bench's", file, 9)


def test_turns_are_asked_in_order_with_the_answers_before_them(tokenizer):
    """One question fills its context in its second turn. The clock spans the whole call."""
    asked = []

    def run(prompt, seed):
        asked.append((prompt, seed))
        time.sleep(0.02)
        return tokenizer.encode(f"answer {len(asked)}")[1:], None

    one, two = {"turns": ["first", "second"]}, {"turns": ["a", "word " * 400, "c"]}
    turns = measure.ask_turns(tokenizer, 512, run, one, 9)
    messages = (["first"], ["first", "answer 1", "second"])
    assert [turn.prompt for turn in turns] == [tokenizer.encode_chat(each) for each in messages]
    assert asked == [(turn.prompt, 9) for turn in turns]
    assert [tokenizer.decode(turn.tokens) for turn in turns] == ["answer 1", "answer 2"]
    assert all(0.02 < turn.seconds < 1 for turn in turns)
    assert len(measure.ask_turns(tokenizer, 512, run, two, 10)) == 1


def test_no_method_always_follows_the_same_one():
    order, names = [], "abcdef"

    def ask(name, question, seed):
        order.append(name)
        return [question]

    records = measure.measure(dict(zip(names, names)), range(12), 2, "test", ask)
    assert len(records) == 6 * 12 * 2
    before = set(pairwise(order))
    assert all(len({a for a, b in before if a != b == name}) >= 4 for name in names)


def record(method, group, number, tokens, seconds, generation=None):
    turn = Turn([], [5] * tokens, seconds, generation)
    return Record(number, method, {"group": group}, [turn])


def test_speedups_are_medians_of_ratios_within_a_round():
    """The machine is three times as slow in the second round: only absolute speeds would notice."""
    records = []
    for number, slow in ((1, 1.0), (2, 3.0), (3, 1.0)):
        for group, gain in (("qa", 2.0), ("rag", 1.0)):
            records.append(record("ar", group, number, 10, slow))
            records.append(record("s2d", group, number, 10, slow / gain))
    records.append(record("s2d", "rag", 3, 0, 1.0))  # one slow answer in the third round
    columns = tables.Comparison("", records).by_group
    speedups = {group: column["s2d"]["speedup"] for group, column in columns.items()}
    assert speedups == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})


def test_what_a_table_measures():
    """The best single exit is chosen in each column, and a mean is one of all columns' figures."""
    made = {}
    for name, method in {"ar": "ar", "two": "sd", "three": "sd", "s2d": "s2d"}.items():
        stats = Stats([4] * 5, Counter({12: 3, 6: 9}), draft_levels=20, accepted_tokens=15)
        made[name] = SimpleNamespace(stats=stats, plan=SimpleNamespace(method=method))
    records = []
    for group, seconds in {"qa": (4.0, 2.0, 1.0, 1.0), "rag": (4.0, 1.0, 2.0, 1.6)}.items():
        for name, each in zip(made, seconds):
            records.append(record(name, group, 1, 20, each, made[name]))
        records.append(record("peer", group, 1, 20, 8.0))
    columns = tables.Comparison("", records).by_group
    found = {"speedup": 2.5, "accepted": 0.75, "mat": 4.0, "needs": 1.6, "of best exit": 0.625}
    assert columns["rag"]["s2d"] == found and columns["rag"]["peer"] == {"speedup": 0.5}
    columns["mean"] = tables.mean_column([columns["qa"], columns["rag"]])
    shown = tables.table("legend", columns, tables.MEASURES).splitlines()[2:]
    cells = "4.00 / 4.00 / 1.00 | 2.50 / 4.00 / 0.62 | 3.08 / 4.00 / 1.15 | 3.25 / 4.00 / 0.81"
    assert shown[5] == f"| s2d   | {cells} |"
    assert len({len(line) for line in shown}) == 1  # aligned


def test_the_whole_command(questions, tmp_path, capsys):
    """With transformers, files of results and answers, and a picture."""
    options = ["--methods", "s2d", "sd:exits=2", "sd:exits=3", "--hf", "--check"]
    options += ["--questions", questions, "--temperature", "0,1"]
    files = ["--plot", tmp_path / "speed.svg", "--out", tmp_path / "out"]
    assert program(bench.main, *SMALL, *options, *files) == 0
    output = capsys.readouterr().out
    ours = ["ar", "s2d", "sd:exits=2", "sd:exits=3"]
    assisted = "transformers assisted"
    settings = [f"{assisted}:tokens={n}:threshold={p:g}" for n, p in peers.SETTINGS]
    each = [*ours, "transformers", "transformers look-up", *settings]
    rows = [name.strip() for name in re.findall(r"^\| (\w[^|]+) \| [\d.]+ ", output, re.M)]
    assert rows == 4 * each  # at both temperatures, of both, and the means
    for temperature, method in product((0, 1), ours[1:]):
        assert f"7b T={temperature} {method}: 0 answers differ from those of ar" in output
    assert (tmp_path / "speed.svg").read_text().count("<path") > len(each)
    answers = [json.loads(line) for line in (tmp_path / "out/7b-T0-s2d.jsonl").open()]
    assert [each["question_id"] for each in answers] == [7, 9]
    [choice] = answers[1]["choices"]
    assert len(choice["turns"]) == len(choice["wall_time"]) == 2
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["machine"]["processor"] and found["arguments"]["check"] is True
    last = found["comparisons"][1]
    assert last["title"] == "7b T=1" and last["options"]["sd:exits=2"]["exits"] == [2]
    assert len(last["answers"]) == len(each) * 2 and [*last["by_group"]["qa"]] == each
    refuses(bench.main, capsys, "is there already", *SMALL, "--plot", tmp_path / "speed.svg")


def test_what_cannot_be_measured_is_refused_before_models_are_loaded(capsys, monkeypatch):
    monkeypatch.setattr(methods, "load_model", lambda *_, **__: pytest.fail("it is loaded"))
    for line, message in (
        (["--methods", "s2d", "--draft", "nowhere"], "no model folder at nowhere"),
        (["--methods", "s2d-tree:exits=0:stop=2"], "stop: "),
        (["--methods", "s2d:decision=nowhere"], "no decision model at nowhere"),
        (["--methods", "s2d:speed=9"], "method s2d:speed=9: unrecognized arguments: --speed=9"),
        (["--temperature", "1,-1"], "temperature: expected a number"),
        (["--out", WEIGHTS / "README.md/out"], "out cannot be written"),
        (["--plot", "bars"], "--plot writes .svg, .png or .pdf, and not bars"),
    ):
        refuses(bench.main, capsys, message, *SMALL, *line)


def test_what_cannot_be_measured_costs_no_other_figure(tmp_path, capsys):
    """A target with too short a context, and a peer. Two folders of one name are told apart."""
    one, other = tmp_path / "a/final", tmp_path / "b/final"
    for folder in (one, other):
        shutil.copytree(WEIGHTS / "mini-7b", folder)
    change_json(other / "config.json", max_position_embeddings=3)
    words = [*SMALL[2:], "--temperature", "0", "--methods", "s2d:exits=0", "--hf"]
    assert program(bench.main, "--target", f"{one},{other}", *words) == 2
    out, error = capsys.readouterr()
    assert error.startswith("transformers assisted is left out: no draft model has a vocabulary")
    assert "\n| transformers " in out and "assisted" not in out
    assert "b/final T=0: no question fits the context" in error
    assert re.findall(r"^\|.* \| (.*final T=0) +\| mean", out, re.M) == [f"{one} T=0"]


def test_methods_are_compared_from_python(tokenizer, monkeypatch, capsys):
    """As the README does, and with a function that is called for the options of each answer."""
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "s2d/bench/README.md").read_text(), re.S)
    names, called = {}, []
    exec(block, names)
    rows = re.findall(r"^\| (\w+) +\| 1?\d", capsys.readouterr().out, re.M)
    assert rows[:3] == ["ar", "s2d", "own"]
    prompts = [*names["prompts"], tokenizer.encode_chat(["Why is that so?"])]
    models = names["target"], names["draft"], prompts

    def fresh():
        called.append(True)
        return {"method": "sd", "exits": [3]}

    runs = {"s2d": {}, "fresh": fresh}
    found = compare(*models, runs, rounds=2, temperature=1.0, max_new_tokens=8)
    assert len(found.records) == 2 * 2 * 3 and len(called) == 2 * 2 + 1  # and a warm-up
    assert found.acceptance["fresh"]["num_accepted_draft_tokens"] > 0
    raises_line(compare, ValueError, "unknown option", *models, {"x": {"exit": [2]}})


def test_check_finds_other_texts_and_exits_with_1(questions, monkeypatch, capsys):
    """What is planted is a wrong token. Rejection sampling above T = 0 is left out."""
    run = measure.generate

    def wrong(*arguments, **options):
        made = run(*arguments, **options)
        return made if made.plan.method == "ar" else replace(made, tokens=[*made.tokens[:2], 99])

    monkeypatch.setattr(measure, "generate", wrong)
    arguments = [*SMALL, "--methods", "s2d", "s2d:rejection", "--questions", questions, "--check"]
    arguments += ["--temperature", "0,1"]
    assert program(bench.main, *arguments) == 1
    out = capsys.readouterr().out
    lines = re.findall(r"^7b (.*): 2 answers differ from those of ar$", out, re.M)
    assert lines == ["T=0 s2d", "T=0 s2d:rejection", "T=1 s2d"]
