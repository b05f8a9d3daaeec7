"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
from helpers import ROOT, WEIGHTS, blocks, change_json, program, raises_line, refuses

from s2d import generate, load_model
from s2d.bench import __main__ as bench
from s2d.bench import compare, figures, measure, methods, peers, specbench, tables
from s2d.bench.figures import Record, Turn
from s2d.stats import Stats
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
    turns = [asked for asked, _ in next(corpus.conversations(2, "held-out", ["rag"]))]
    question = {"question_id": 15, "category": "rag", "group": "rag", "turns": turns}
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
    order = []
    names = "abcdef"

    def ask(name, question, seed):
        order.append(name)
        return [question]

    records = measure.measure(dict(zip(names, names)), range(12), 2, "test", ask)
    assert len(records) == 6 * 12 * 2
    before = set(pairwise(order))
    assert all(len({a for a, b in before if a != b == name}) >= 4 for name in names)


def record(method, group, number, tokens, seconds, steps=()):
    """Of ``steps``, each as a pair of drafted levels and accepted tokens."""
    stats = Stats([2], [accepted + 1 for _, accepted in steps])
    for levels, accepted in steps:
        stats.draft_levels += levels
        stats.accepted[1, 2] += accepted
    made = SimpleNamespace(stats=stats) if steps else None
    turn = Turn([], [5] * tokens, seconds, made)
    return Record(number, method, 0, {"group": group}, [turn])


def test_speedups_are_medians_of_ratios_within_a_round():
    """The machine is three times as slow in the second round: only absolute speeds would notice."""
    records = []
    for number, slow in ((1, 1.0), (2, 3.0), (3, 1.0)):
        for group, gain in (("qa", 2.0), ("rag", 1.0)):
            seconds = slow / gain + (number == 3)  # one slow round
            records.append(record("ar", group, number, 10, slow))
            records.append(record("s2d", group, number, 10, seconds))
    columns = tables.Comparison("", records, {}).by_group
    speedups = {group: column["s2d"]["speedup"].value for group, column in columns.items()}
    assert speedups == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})


def test_what_a_table_measures():
    """The best exit is that of a column; a mean is one of all columns' figures.

    A method that is no preset, or was not asked for as s2d, is compared with no exit.
    """
    records = []
    presets = {"ar": "ar", "two": "sd", "three": "sd", "s2d": "s2d"}
    options = {name: SimpleNamespace(method=method) for name, method in presets.items()}
    for group, seconds in {"qa": (4.0, 2.0, 1.0, 1.0), "rag": (4.0, 1.0, 2.0, 1.6)}.items():
        for name, each in zip(presets, seconds):
            records.append(record(name, group, 1, 20, each, [(4, 3)] * 5))
        records.append(record("own", group, 1, 20, 8.0))
    columns = tables.Comparison("", records, options).by_group
    found = {measure: figure.value for measure, figure in columns["rag"]["s2d"].items()}
    expected = {"speedup": 2.5, "accepted": 0.75, "mat": 4.0, "needs": 1.6}
    assert found == expected | {"of best exit": 0.625}
    assert [*columns["rag"]["own"]] == ["speedup"] and columns["rag"]["own"]["speedup"].value == 0.5
    columns = {group: columns[group] for group in ("qa", "rag")}
    columns["mean"] = figures.mean_column([*columns.values()])
    shown = tables.table("legend", columns, tables.MEASURES).splitlines()[2:]
    cells = "4.00 / 4.00 / 1.00", "2.50 / 4.00 / 0.62", "3.25 / 4.00 / 0.81"
    assert shown[5] == f"| s2d   | {' | '.join(cells)} |" and "| qa (1)  " in shown[0]
    assert len({len(line) for line in shown}) == 1  # aligned


def test_the_whole_command(questions, tmp_path, capsys, monkeypatch):
    """With transformers, files of results and answers, and a picture."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(peers, "SETTINGS", peers.SETTINGS[1:3])
    options = ["--methods", "s2d", "sd:exits=2", "sd:exits=3", "--hf", "--check"]
    options += ["--questions", questions, "--temperature", "0,1", "--top-k", "500", "--seed", "7"]
    files = ["--plot", tmp_path / "speed.svg", "--out", tmp_path / "out"]
    assert program(bench.main, *SMALL, *options, *files) == 0
    output = capsys.readouterr().out
    ours = ["ar", "s2d", "sd:exits=2", "sd:exits=3"]
    settings = ["8:threshold=0", "8:threshold=0.4"]
    settings = [f"transformers assisted:tokens={each}" for each in settings]
    each = [*ours, "transformers", "transformers look-up", *settings]
    rows = [name.strip() for name in re.findall(r"^\| (\w[^|]+) \| [\d.]+ ", output, re.M)]
    assert rows == 3 * each  # at both temperatures, and of both
    for temperature, method in product((0, 1), ours[1:]):
        assert (
            f"7b T={temperature} {method}: 0 answers differ from those of the target alone"
            in output
        )
    assert (tmp_path / "speed.svg").read_text().count("<path") > len(each)
    answers = [json.loads(line) for line in (tmp_path / "out/7b-T0-s2d.jsonl").open()]
    assert [each["question_id"] for each in answers] == [7, 9]
    [choice] = answers[1]["choices"]
    assert len(choice["turns"]) == len(choice["wall_time"]) == 2
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["machine"]["processor"] and found["machine"]["python"]
    assert found["arguments"]["check"] is True and found["arguments"]["rounds"] == 1
    models = found["models"]["7b"]
    assert models["target"].endswith("mini-7b") and models["dtype"] == "torch.float32"
    assert "mini-draft" in models["drafts"]["s2d"]
    assert "--top-k 500" in found["command"]
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert found["commit"].removesuffix("-dirty") == git.stdout.strip()  # "" in a copy without git
    last = found["comparisons"][1]
    assert last["title"] == "7b T=1" and last["options"]["sd:exits=2"]["exits"] == [2]
    assert len(last["answers"]) == len(each) * 2 and [*last["by_group"]["qa"]] == each
    # An answer can be made again from what the file says of it.
    answer = next(each for each in last["answers"] if each["method"] == "s2d")
    again = dict(temperature=1.0, top_k=500, seed=answer["seed"], max_new_tokens=4)
    models = load_model(WEIGHTS / "mini-7b"), load_model(WEIGHTS / "mini-draft")
    [turn] = answer["turns"]
    assert generate(models[0], turn["prompt"], models[1], **again).tokens == turn["tokens"]
    refuses(bench.main, capsys, "is there already", *SMALL, "--plot", tmp_path / "speed.svg")


def test_what_cannot_be_measured_is_refused_before_models_are_loaded(capsys, monkeypatch):
    monkeypatch.setattr(methods, "load_model", lambda *_, **__: pytest.fail("it is loaded"))
    for line, message in (
        (["--methods", "s2d", "--draft", "nowhere"], "no model folder at nowhere"),
        (["--methods", "s2d-tree:exits=0:stop=2"], "stop: "),
        (["--methods", "s2d:decision=nowhere"], "no decision model at nowhere"),
        (["--methods", "s2d:speed=9"], "method s2d:speed=9: unrecognized arguments: --speed=9"),
        (["--temperature", "1,-1"], "temperature: expected 0, or a number"),
        (["--top-p", "2"], "--top-p: expected a number"),
        (["--rounds", "1000000000000"], "--rounds: expected a number from 1"),
        (["--out", WEIGHTS / "README.md/out"], "out cannot be written"),
        (["--plot", f"{'long' * 99}.svg"], "cannot be written"),
        (["--plot", "bars"], "--plot writes .svg, .png or .pdf, and not bars"),
    ):
        refuses(bench.main, capsys, message, *SMALL, *line)


def test_what_cannot_be_measured_costs_no_other_figure(questions, tmp_path, capsys):
    """A target with too short a context, and a peer. Two folders of one name are told apart."""
    one, other = tmp_path / "a/final", tmp_path / "b/final"
    for folder in (one, other):
        shutil.copytree(WEIGHTS / "mini-7b", folder)
    change_json(other / "config.json", max_position_embeddings=3)
    words = [*SMALL[2:], "--temperature", "0", "--methods", "s2d:exits=0", "--hf"]
    words += ["--questions", questions]
    assert program(bench.main, "--target", f"{one},{other}", *words) == 2
    out, error = capsys.readouterr()
    assert error.startswith("transformers assisted is left out: no draft model has a vocabulary")
    assert "\n| transformers " in out and "assisted" not in out
    assert "b/final T=0: no question fits the context" in error
    assert re.findall(r"^\|.* \| (.*final T=0) \(2\) +\| mean", out, re.M) == [f"{one} T=0"]


def test_what_is_measured_is_written_if_nobody_reads(questions, tmp_path, monkeypatch):
    """Also where the name of a file would be too long, as folders have long names."""
    target = tmp_path / f"home/{'long-' * 40}"
    shutil.copytree(WEIGHTS / "mini-7b", target)
    words = ["--target", target, *SMALL[2:], "--methods", "s2d-tree:exits=0"]
    words += ["--questions", questions, "--out"]
    monkeypatch.setattr("sys.stdout", open("/dev/full", "w"))
    assert program(bench.main, *words, tmp_path / "out") == 2
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert len(found["comparisons"]) == 2 and len([*tmp_path.glob("out/*.jsonl")]) == 4


def test_methods_are_compared_from_python(tokenizer, monkeypatch, capsys):
    """As the README does: with an exit, a shape and a rule of one's own, and all of it as JSON."""
    monkeypatch.chdir(ROOT)
    [block] = blocks("s2d/bench/README.md")
    assert len([line for line in block.splitlines() if line]) <= 32
    names = {}
    exec(block.replace("max_new_tokens=32", "max_new_tokens=6"), names)
    out, error = capsys.readouterr()
    rows = re.findall(r"^\| (\w+) +\| 1?\d", out, re.M)
    assert rows[:3] == ["ar", "s2d", "own"]
    found = json.loads(names["text"])
    assert found["options"]["own"]["exits"] == ["Repeat", 2, 3]
    assert found["options"]["own"]["tree"] == "Fork"
    assert found["options"]["own"]["rule"].startswith("cold in line")
    assert "of best exit" not in found["by_group"]["overall"]["own"]
    models = names["target"], names["draft"]
    questions = [{"turns": ["Give me 3 tips.", "And the first?"], "group": "qa"}]
    questions += [tokenizer.encode_chat(["Why is that so?"])]
    own = {"s2d": {"method": "s2d"}, "three": {"method": "sd", "exits": [3]}}
    common = {"temperature": 1.0, "max_new_tokens": 4}
    compared = [compare(*models, questions, own, 1, tokenizer, seed=n, **common) for n in (0, 0, 5)]
    one, again, other = [[r.turns[0].tokens for r in each.records] for each in compared]
    assert one == again != other
    found = compared[0]
    assert [len(record.turns) for record in found.records] == [2, 2, 2, 1, 1, 1]
    assert "of best exit" in found.by_group["qa"]["s2d"]
    assert sum(found.acceptance["three"]["num_accepted_tokens_per_pos"]) > 0
    raises_line(compare, ValueError, "need a tokenizer", *models, questions, {})
    seeded = {"s2d": {"seed": 5}}
    raises_line(compare, ValueError, "method s2d: expected no seed", *models, [[1]], seeded)
    questions = [[1, 5], [1] * 600, {"turns": ["Give me 3 tips.", "so " * 600]}]
    capsys.readouterr()
    found = compare(*models, questions, {"s2d": {}}, 1, tokenizer, max_new_tokens=2).as_json()
    words = "left out, as the context is full: question 1 from turn 1, 2 from turn 2"
    assert capsys.readouterr().err == f"compare: {words}\n"
    assert found["rounds"] == 1 and found["machine"]["versions"]["s2d"]
    read = [found["models"]["target"], found["models"]["drafts"]["s2d"]]
    assert len({each["checksum"] for each in read}) == 2 and read[1]["dtype"] == "torch.float32"


def test_tokens_per_step_are_those_of_the_readme(tmp_path, monkeypatch):
    """By the command there, but for the errors. All takes minutes: only with TEST_FIGURES."""
    answer = measure.answer

    def answer_short(prompt, seed, target, draft, options):  # as only speeds depend on "ar"
        length = 1 if options.method == "ar" else options.max_new_tokens
        return answer(prompt, seed, target, draft, replace(options, max_new_tokens=length))

    monkeypatch.setattr(measure, "answer", answer_short)
    text = (ROOT / "s2d/bench/README.md").read_text()
    section = text[text.index("## Rules") :]
    command = re.search(r"```sh\npython -m s2d.bench (.*?)\n```", section, re.S)[1]
    words = shlex.split(command.replace("\\\n", "")) + ["--out", tmp_path / "out"]
    if not os.environ.get("TEST_FIGURES"):
        words += "--target 7b --temperature 0 --methods s2d".split()
    assert program(bench.main, *words) == 0
    found = json.loads((tmp_path / "out/results.json").read_text())["comparisons"]
    lines = [re.split(r" *\| *", line) for line in re.findall(r"^\|.*", section, re.M)]
    rows = {line[1].strip("`"): dict(zip(lines[0], line)) for line in lines}
    for comparison in found:
        for method, measures in comparison["by_group"]["overall"].items():
            if method != "ar":
                shown = rows[method][comparison["title"]].partition(" ±")[0]
                value = measures["mat"]["value"]  # a processor may round a tie otherwise
                assert value == pytest.approx(float(shown), abs=0.02), comparison["title"]


def test_check_finds_other_texts_and_exits_with_1(questions, monkeypatch, capsys):
    """What is planted is a wrong token. Rejection sampling above T = 0 is left out."""
    answer = measure.answer

    def answer_wrong(prompt, seed, target, draft, options):
        tokens, made = answer(prompt, seed, target, draft, options)
        return tokens if options.method == "ar" else [*tokens[:2], 99], made

    monkeypatch.setattr(measure, "answer", answer_wrong)
    arguments = ["--methods", "s2d", "s2d:rejection", "--check", "--temperature", "0,1"]
    assert program(bench.main, *SMALL, *arguments, "--questions", questions) == 1
    out = capsys.readouterr().out
    words = "2 answers differ from those of the target alone, at tokens up to .* apart: a fault"
    lines = re.findall(rf"^7b (.*): {words}$", out, re.M)
    assert lines == ["T=0 s2d", "T=0 s2d:rejection", "T=1 s2d"]
