"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import json
import re
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    ROOT,
    WEIGHTS,
    change_json,
    nearly_equal,
    program,
    raises_line,
    random_llama,
    refuses,
)

from s2d import generate, load_model
from s2d.bench import __main__ as bench
from s2d.bench import check, compare, comparison, measure, methods, peers, specbench, tables
from s2d.bench.measure import Record, Turn
from s2d.checkpoint import save_model
from s2d.decoder import Stats
from s2d.options import Options
from s2d.train import corpus
from s2d.tree import GrowingShape

SMALL = "--targets 7b --limit 1 --rounds 1 --max-new-tokens 4".split()


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
    good = {"question_id": 2, "category": "roleplay", "turns": ["one\u2028line\x85still", "b"]}
    file = tmp_path / "q.jsonl"
    lines = [json.dumps(good | {"more": 0}, ensure_ascii=False), json.dumps(good)]
    file.write_text("\n \n".join(lines) + "\r\n\n\n", encoding="utf-8")
    assert specbench.read_questions(file, 1) == [good | {"group": "mt_bench"}]
    for bad in ("no json", json.dumps(good | {"turns": "abc"})):
        file.write_text(bad)
        raises_line(specbench.read_questions, ValueError, "not in Spec-Bench's", file, 9)
    file.write_text("\n \n")
    raises_line(specbench.read_questions, ValueError, "has no questions", file, 9)


def test_methods_are_names_with_options(capsys):
    asked = {
        "sd:exits=2:draft_length=8": {"exits": (2,), "draft_length": 8},
        "mcsd:tree=4,2,2,1:init=target": {"tree": (4, 2, 2, 1), "init": "target"},
        "s2d-tree:tree=4x8x24:stop=0.3": {"tree": GrowingShape(4, 8, 24), "stop": 0.3},
        "s2d:rejection": {"rule": "rejection"},
        "s2d:decision=file:draft=other": {"decision": Path("file"), "draft": Path("other")},
    }
    for text, options in asked.items():
        assert methods.parse_method(text) == {"method": text.split(":")[0], **options}
    message = "method s2d:speed=9: unrecognized arguments: --speed=9"
    refuses(bench.main, capsys, message, "--methods", "s2d:speed=9")


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
    asked = sorted((each.method, each.round, each.question) for each in records)
    assert asked == list(product(names, (1, 2), range(12)))
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
    result = tables.Comparison("", records).by_group
    speedups = {group: result[group]["s2d"]["speedup"] for group in ("qa", "rag", "overall")}
    assert speedups == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})
    records.append(record("s2d", "qa", 3, 0, 1.0))  # one slow answer in the third round
    changed = tables.Comparison("", records).by_group
    assert changed["overall"]["s2d"]["speedup"] == pytest.approx(4 / 3)


def test_a_table_of_what_was_accepted():
    """In all answers of a method together."""
    target, draft = nearly_equal(3)
    options = dict(exits=[2, 4], draft_length=3, thresholds=[0.0, 0.0], max_new_tokens=9)
    made = [generate(target, prompt, draft, **options) for prompt in ([1, 2], [3, 4])]
    records = [record("s2d", "qa", 1, 10, 0.5, each) for each in made]
    records.append(record("transformers", "qa", 1, 10, 0.5))
    header, [name, rates, exits] = tables.acceptance_table(
        tables.Comparison("", records).acceptance
    )
    drafted = sum(each.stats.draft_tokens for each in made)
    accepted = sum(each.stats.accepted_tokens for each in made)
    assert name == "s2d" and len(rates.split()) == 3  # positions
    assert exits == f"2: {drafted} / {drafted} / {accepted}; 4: 0 / 0 / 0"


def test_a_table_of_speedups():
    """The best single exit is chosen in each column, and a mean is one of all columns' figures."""
    made = {}
    for name, method in {"ar": "ar", "two": "sd", "three": "sd", "s2d": "s2d"}.items():
        stats = Stats([4] * 5, Counter({12: 3, 6: 9}), draft_levels=20, accepted_tokens=15)
        made[name] = SimpleNamespace(stats=stats, options=SimpleNamespace(method=method))
    records = []
    for group, seconds in {"qa": (4.0, 2.0, 1.0, 1.0), "rag": (4.0, 1.0, 2.0, 1.6)}.items():
        for name, each in zip(made, seconds):
            records.append(record(name, group, 1, 20, each, made[name]))
        records.append(record("peer", group, 1, 20, 8.0))
    columns = tables.Comparison("", records).by_group
    found = {"speedup": 2.5, "accepted": 0.75, "mat": 4.0, "needs": 1.6, "of best exit": 0.625}
    assert columns["rag"]["s2d"] == found
    columns["mean"] = tables.mean_column([columns["qa"], columns["rag"]])
    lines = ["legend", "", "| | qa | rag | overall | mean |", "| - | - | - | - | - |"]
    lines.append("| ar | 1.00 / 4.00 | 1.00 / 4.00 | 1.00 / 4.00 | 1.00 / 4.00 |")
    lines.append("| two | 2.00 / 4.00 | 4.00 / 4.00 | 2.67 / 4.00 | 3.00 / 4.00 |")
    lines.append("| three | 4.00 / 4.00 | 2.00 / 4.00 | 2.67 / 4.00 | 3.00 / 4.00 |")
    s2d = "4.00 / 4.00 / 1.00", "2.50 / 4.00 / 0.62", "3.08 / 4.00 / 1.15", "3.25 / 4.00 / 0.81"
    lines.append(f"| s2d | {' | '.join(s2d)} |")
    lines.append("| peer | 0.50 | 0.50 | 0.50 | 0.50 |")
    text = tables.table("legend", columns, tables.MEASURES)
    assert len({len(line) for line in text.splitlines()[2:]}) == 1  # aligned
    assert re.sub("-+", "-", re.sub(" +", " ", text)).splitlines() == lines


def test_the_whole_command(questions, tmp_path, capsys):
    """With transformers, whose greedy text is the target's own, and a picture."""
    options = ["--methods", "s2d", "sd:exits=2", "sd:exits=3", "--hf", "--check"]
    options += ["--questions", questions]
    files = ["--plot", tmp_path / "speed.svg", "--out", tmp_path / "out"]
    assert program(bench.main, *SMALL, "--temperature", "0,1", *options, *files) == 0
    output = capsys.readouterr().out
    ours = ["ar", "s2d", "sd:exits=2", "sd:exits=3"]
    assisted = "transformers assisted"
    settings = [f"{assisted}:tokens={n}:threshold={p:g}" for n, p in peers.SETTINGS]
    each = [*ours, "transformers", "transformers look-up", *settings]
    rows = [name.strip() for name in re.findall(r"^\| (\w[^|]+) \| [\d.]+ ", output, re.M)]
    assert rows == 4 * each  # at both temperatures, of both, and the means
    ratios = re.findall(r"^\| s2d +\| [\d.]+ / [\d.]+ / [\d.]+ ", output, re.M)
    assert len(ratios) == 4
    rows = [name.strip() for name in re.findall(r"^\| (\w[^|]+) \| \d+% ", output, re.M)]
    assert rows == 2 * ours[1:]  # what was accepted
    for temperature, method in product((0, 1), ours[1:]):
        assert f"7b T={temperature} {method}: 2 answers compared: identical" in output
    assert (tmp_path / "speed.svg").read_text().count("<path") > len(each)
    texts = set()
    for name in ("ar", "s2d", "transformers", "transformers-assisted-tokens-20-threshold-0.4"):
        lines = (tmp_path / "out" / f"7b-T0-{name}.jsonl").read_text().splitlines()
        one, two = map(json.loads, lines)
        assert (two["question_id"], two["category"]) == (9, "coding")
        [choice] = two["choices"]
        assert len(choice["turns"]) == len(choice["wall_time"]) == 2  # lists by turn
        lengths = choice["accept_lengths"]
        assert sum(lengths) == (sum(choice["new_tokens"]) if name in ours else 0)
        texts.add(json.dumps([choice["turns"], one["choices"][0]["turns"]]))
    assert len(texts) == 1
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert torch.__version__.startswith(found["machine"]["versions"]["torch"])
    assert found["machine"]["processor"] and found["arguments"]["check"] is True
    assert [each["title"] for each in found["comparisons"]] == ["7b T=0", "7b T=1"]
    last = found["comparisons"][1]
    assert last["acceptance"]["s2d"]["num_accepted_tokens_per_pos"][0] > 0
    assert last["options"]["s2d"]["temperature"] == 1.0
    assert len(last["answers"]) == len(each) * 2 and [*last["by_group"]["qa"]] == each
    turn = last["answers"][0]["turns"][0]
    assert sum(turn["generation"]["accept_lengths"]) == len(turn["tokens"]) and turn["seconds"] > 0
    refuses(bench.main, capsys, "is there already", *SMALL, "--plot", tmp_path / "speed.svg")


@pytest.fixture
def family(tmp_path):
    """Two targets in folders of one name, and one of another vocabulary."""
    sizes = dict(hidden_size=16, intermediate_size=24, head_dim=4, max_position_embeddings=400)
    for seed, name, vocab_size in ((0, "a/final", 1024), (1, "b/final", 1024), (2, "other", 1200)):
        model = random_llama(seed, vocab_size=vocab_size, **sizes)
        save_model(model, tmp_path / name, WEIGHTS / "mini-7b", torch.float32)
    return tmp_path


def test_what_cannot_be_measured_is_refused_before_models_are_loaded(family, capsys, monkeypatch):
    common = ["--targets", f"{family}/a/final,{family}/other", *SMALL[2:]]
    draft = ["--draft", WEIGHTS / "mini-draft", "--temperature", "0"]
    monkeypatch.setattr(methods, "load_model", lambda *_, **__: pytest.fail("it is loaded"))
    for line, message in (
        (["--methods", "s2d", *draft], "draft and target must share a vocabulary"),
        (["--methods", "s2d-tree:exits=0:stop=2"], "stop: "),
        (["--methods", "s2d:decision=nowhere"], "no decision model at nowhere"),
        (["--temperature", "1,-1"], "temperature: expected a number"),
    ):
        refuses(bench.main, capsys, message, *common, *line)


def test_a_target_that_cannot_be_measured_costs_no_figure_of_those_before_it(family, capsys):
    """Its context is too short. Two folders of one name are told apart."""
    folders = f"{family}/a/final,{family}/b/final"
    change_json(family / "b/final/config.json", max_position_embeddings=3)
    words = ["--targets", folders, *SMALL[2:], "--temperature", "0"]
    assert program(bench.main, *words, "--methods", "s2d-tree:exits=0") == 2
    out, error = capsys.readouterr()
    assert "b/final T=0: no question fits the context" in error
    assert re.findall(r"^\|.* \| (.*final T=0) +\| mean", out, re.M) == [f"{family}/a/final T=0"]


def test_a_padded_vocabulary_leaves_out_the_peer_that_cannot_take_it(family, capsys):
    """On all targets; ours, and the other peers, are measured."""
    small = family / "small"
    save_model(random_llama(3, vocab_size=1100, hidden_size=16, head_dim=4), small)
    words = ["--targets", family / "other", "--draft", small, "--hf", "--methods", "s2d"]
    assert program(bench.main, *words, *SMALL[2:], "--temperature", "0") == 0
    out, error = capsys.readouterr()
    assert error.startswith("transformers assisted is left out: no draft model has a vocabulary")
    assert out.count("\n| transformers ") == 2 * 3 and "assisted" not in out


def test_methods_are_compared_from_python(tokenizer):
    """A function is called for the options of each answer."""
    target, draft = load_model(WEIGHTS / "mini-7b"), load_model(WEIGHTS / "mini-draft")
    prompts = [tokenizer.encode_chat([text]) for text in ("Give me a tip.", "Why is that so?")]
    called = []

    def fresh():
        called.append(True)
        return {"method": "sd", "exits": [3]}

    runs = {"s2d": {}, "fresh": fresh}
    common = dict(temperature=1.0, max_new_tokens=8)
    found = compare(target, draft, prompts, runs, rounds=2, **common)
    assert len(found.records) == 2 * 2 * 3 and len(called) == 2 * 2 + 1  # and a warm-up
    assert [*found.by_group] == ["overall"]
    texts = [[each.tokens for each in one.turns] for one in found.records]
    assert texts[0] == texts[1] == texts[2] != texts[3]  # of three methods, then another prompt
    rows = re.findall(r"^\| (\w+) +\| [\d.]+ / [\d.]+ ", str(found), re.M)
    assert rows == ["ar", *runs]
    saved = json.loads(json.dumps(found.as_json(), default=str))
    assert saved["options"]["fresh"]["exits"] == [3]
    raises_line(compare, ValueError, "unknown option", target, draft, prompts, {"x": {"exit": [2]}})


def test_ties_are_told_from_bugs():
    """By the gap in float64, and by how far the target's own pass is off."""
    precise = random_llama(0)
    with torch.no_grad():  # two likely tokens that can never be told apart
        precise.lm_head.weight[[7, 9]] = 1.5 * precise.lm_head.weight[9]
    logits = lambda tokens: precise(torch.tensor([tokens]))[0, -1]  # noqa: E731
    prompt = next(p for p in product(range(61), repeat=2) if logits(p).argmax() in (7, 9))
    prompt, least = list(prompt), logits(prompt).argmin().item()
    single = random_llama(0).float()
    single.load_state_dict(precise.state_dict())

    def difference(own, theirs, temperature=0.0):
        alone = SimpleNamespace(options=Options("ar", temperature=temperature))
        return check.first_difference(single, precise, Turn(prompt, own, 1.0, alone), theirs)

    gap, allowed = difference([7, 5], [9, 5])
    assert gap == 0.0 < allowed < 2e-4
    assert difference([7], [7, 5]) == (inf, 0.0)
    # Above T = 0 the noise tells the two apart.
    for gap, allowed in (difference([7], [least]), difference([7], [9], temperature=0.5)):
        assert gap > allowed


@pytest.mark.parametrize("temperature", [0, 1])
def test_check_tells_a_bug_from_a_tie_and_exits_with_1(temperature, questions, monkeypatch, capsys):
    """What is planted is a wrong token, and then two tokens that are as likely."""
    run = comparison.generate

    def wrong(*arguments, **options):
        made = run(*arguments, **options)
        return made if made.options.method == "ar" else replace(made, tokens=[*made.tokens[:2], 99])

    monkeypatch.setattr(comparison, "generate", wrong)
    arguments = [*SMALL, "--methods", "s2d", "s2d:rejection", "--questions", questions, "--check"]
    arguments += ["--temperature", temperature]
    assert program(bench.main, *arguments) == 1
    lines = re.findall(r"^7b T=\d (.*: 2 answers compared: .*)", capsys.readouterr().out, re.M)
    bug = "2 answers compared: BUG: 2 of 2 differ by more than rounding explains"
    compared = ["s2d", "s2d:rejection"] if temperature == 0 else ["s2d"]
    assert lines == [f"{method}: {bug}" for method in compared]
    monkeypatch.setattr(check, "first_difference", lambda *_: (1e-5, 1e-4))
    assert program(bench.main, *arguments) == 0
    line = "7b T=. s2d: 2 answers compared: 2 ties by rounding, largest gap 1.0e-05"
    assert re.search(line, capsys.readouterr().out)


def test_the_readme_compares_an_exit_of_ones_own(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "s2d/bench/README.md").read_text(), re.S)
    names = {}
    exec(block, names)
    rows = re.findall(r"^\| (\w+) +\| 1?\d", capsys.readouterr().out, re.M)
    assert rows[:3] == ["ar", "s2d", "own"]
    models = names["target"], names["draft"], names["prompts"]
    found = names["compare"](*models, {"ar": {"method": "s2d"}}, rounds=1, max_new_tokens=4)
    assert found.options["ar"].method == "ar"  # always the target alone
