"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import json
import re
import time
from collections import Counter
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

HF = "hf", "--target", "7b"
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
    question = specbench.corpus_questions(3)[-3]
    assert question["turns"] == [turn for turn, _ in held_out.turns]
    assert (question["question_id"], question["category"], question["group"]) == (15, "rag", "rag")


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
        "s2d:decision=file": {"decision": Path("file")},
        "s2d:draft=other": {"draft": Path("other")},
        "s2d-tree:exits=0": {"exits": (0,), "draft": None},
    }
    for text, options in asked.items():
        method = methods.parse_method(text, Path("draft"))
        expected = {"method": text.split(":")[0], "draft": Path("draft"), **options}
        assert method.options | {"draft": method.draft} == expected
    message = "method s2d:speed=9: unrecognized arguments: --speed=9"
    refuses(bench.main, capsys, message, "--methods", "s2d:speed=9")


def test_turns_are_asked_in_order_with_the_answers_before_them(tokenizer):
    """One fills its context in its second turn."""
    asked = []

    def run(prompt, seed):
        asked.append((prompt, seed))
        return tokenizer.encode(f"answer {len(asked)}")[1:], None

    one, two = {"turns": ["first", "second"]}, {"turns": ["a", "word " * 400, "c"]}
    first = measure.ask_turns(tokenizer, 512, run, one, 9)
    messages = (["first"], ["first", "answer 1", "second"])
    assert [turn.prompt for turn in first] == [tokenizer.encode_chat(each) for each in messages]
    assert asked == [(turn.prompt, 9) for turn in first]
    texts = [tokenizer.decode(turn.tokens) for turn in first]
    assert texts == ["answer 1", "answer 2"]
    assert len(measure.ask_turns(tokenizer, 512, run, two, 10)) == 1
    asked = lambda run, question, seed: []  # noqa: E731
    raises_line(measure.measure, ValueError, "no question fits", {"ar": run}, [one], 1, "x", asked)


def test_no_method_always_follows_the_same_one():
    order, names = [], "abcdef"

    def ask(name, question, seed):
        order.append(name)
        return [question]

    records = measure.measure(dict(zip(names, names)), range(12), 2, "test", ask)
    asked = sorted((each.method, each.round, each.question) for each in records)
    assert asked == list(product(names, (1, 2), range(12)))
    before = {(a, b) for a, b in pairwise(order) if a != b}
    assert all(len({a for a, b in before if b == name}) >= 4 for name in names)


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
    target, draft = nearly_equal(3)
    alone = generate(target, [1, 2], method="ar", max_new_tokens=9)
    records = [record("transformers", "qa", 1, 10, 0.5), record("ar", "qa", 1, 10, 0.5, alone)]
    for prompt in ([1, 2], [3, 4]):
        options = dict(exits=[2, 4], draft_length=3, thresholds=[0.0, 0.0], max_new_tokens=9)
        made = generate(target, prompt, draft, **options)
        records.append(record("s2d", "qa", 1, 10, 0.5, made))
    found = tables.Comparison("", records).acceptance
    header, two = tables.acceptance_table(found)
    assert two[0] == "s2d" and len(two[1].split()) == 3  # positions
    stats = [each.turns[0].generation.stats for each in records[2:]]
    drafted = sum(each.draft_tokens for each in stats)
    accepted = sum(each.accepted_tokens for each in stats)
    assert two[2] == f"2: {drafted} / {drafted} / {drafted} / {accepted}; 4: 0 / 0 / 0 / 0"
    first = sum(each.depth_accepted[1] for each in stats)
    assert two[1].split()[0] == f"{first / sum(each.depth_sent[1] for each in stats):.0%}"


def test_tables():
    stats = Stats([4] * 5, Counter({12: 3, 6: 9}), draft_levels=20, accepted_tokens=15)
    ours = SimpleNamespace(stats=stats)
    records = [record("ar", "qa", 1, 10, 0.5), record("s2d", "qa", 1, 20, 1.0, ours)]
    records += [record("ar", "qa", 2, 10, 1.0), record("s2d", "qa", 2, 20, 1.0, ours)]
    result = tables.Comparison("", records).by_group
    assert tables.table(result, tables.FORMATS) == [
        ["", "qa", "overall"],
        ["ar", *2 * ["1.00 / 100%"]],
        ["s2d", *2 * ["1.50 / 4.00 / 2.67 / 75% / 0%"]],
    ]
    final = {"a T=0": result["overall"], "a T=1": {"ar": result["overall"]["ar"]}}
    rows = ["|     | a T=0       | a T=1 | mean        |"]
    rows += ["| --- | ----------- | ----- | ----------- |"]
    rows += ["| ar  | 1.00        | 1.00  | 1.00        |"]
    rows += ["| s2d | 1.50 / 4.00 |       | 1.50 / 4.00 |"]
    made = tables.table(tables.with_means(final), ("speedup", "mat"))
    assert tables.render(made).splitlines() == rows


def test_s2d_next_to_the_best_of_several_rows():
    """The best is chosen afterwards, in each column and group; ratios are of s2d to it."""
    names = ("sd:exits=2", "sd:exits=3", "s2d")
    speedups = {"qa": (1.5, 2.0, 1.8), "rag": (3.0, 2.0, 3.6), "overall": (2.0, 1.0, 2.2)}
    found = {}
    for group, values in speedups.items():
        found[group] = {row: {"speedup": each} for row, each in zip(names, values)}
    other = {"overall": found["overall"] | {"s2d": {"speedup": 1.4}}}
    lines = tables.best_table({"a T=0": found, "a T=1": other}, names[:2], "s2d")
    assert lines == [
        ["", "a T=0", "a T=1", "mean of s2d / best"],
        ["qa", "sd:exits=3 2.00 / 1.80 / 0.90", "", "0.90"],
        ["rag", "sd:exits=2 3.00 / 3.60 / 1.20", "", "1.20"],
        ["overall", "sd:exits=2 2.00 / 2.20 / 1.10", "sd:exits=2 2.00 / 1.40 / 0.70", "0.90"],
    ]


def test_clocks_span_the_whole_call():
    def run(prompt, seed):
        time.sleep(0.02)
        return [5, 6], None

    turn = measure.time_run(run, [1], 0)
    assert turn.tokens == [5, 6] and 0.02 < turn.seconds < 1


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
    assert rows == 3 * each  # at both temperatures, and in the last table
    assert "speedups of the best single exit / s2d / their ratio" in output
    assert re.findall(r"^\| overall +\| sd:exits=[23] [\d.]+ / ", output, re.M)
    rows = [name.strip() for name in re.findall(r"^\| (\w[^|]+) \| \d+% ", output, re.M)]
    assert rows == 2 * ours[1:]  # what was accepted
    for temperature, method in product((0, 1), ours[1:]):
        assert f"7b T={temperature} {method}: 2 answers compared: identical" in output
    assert (tmp_path / "speed.svg").read_text().count("<path") > len(each)
    texts = set()
    for name in ("ar", "s2d", "transformers", "transformers-assisted-tokens-20-threshold-0.4"):
        lines = (tmp_path / "out" / f"7b-T0-{name}.jsonl").read_text().splitlines()
        read = list(map(json.loads, lines))
        asked = [(line["question_id"], line["category"]) for line in read]
        assert asked == [(7, "qa"), (9, "coding")]
        choices = [line["choices"][0] for line in read]
        texts.add(json.dumps([choice["turns"] for choice in choices]))
        if name in ours:  # lists by turn, and an accept length per step
            for choice in choices:
                assert len(choice["turns"]) == len(choice["wall_time"]) == len(choice["new_tokens"])
                assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) > 0
                assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    assert len(texts) == 1
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["machine"]["processor"] and found["arguments"]["check"] is True
    assert [each["title"] for each in found["comparisons"]] == ["7b T=0", "7b T=1"]
    last = found["comparisons"][1]
    assert last["acceptance"]["s2d"]["num_accepted_tokens_per_pos"][0] > 0
    assert last["options"]["s2d"]["temperature"] == 1.0
    assert len(last["answers"]) == len(each) * 2 and [*last["by_group"]["qa"]] == each
    turn = last["answers"][0]["turns"][0]
    assert sum(turn["stats"]["accept_lengths"]) == len(turn["tokens"]) and turn["seconds"] > 0
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
    monkeypatch.setattr(comparison, "load_model", lambda *_, **__: pytest.fail("it is loaded"))
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
    """Before anything is loaded; ours, and the other peers, are measured."""
    small = family / "small"
    save_model(random_llama(3, vocab_size=1100, hidden_size=16, head_dim=4), small)
    words = ["--targets", family / "other", "--draft", small, "--hf", "--methods", "s2d"]
    assert program(bench.main, *words, *SMALL[2:], "--temperature", "0") == 0
    out, error = capsys.readouterr()
    assert f"transformers assisted is left out: the vocabulary of {small} is padded" in error
    assert out.count("\n| transformers ") == 4 and "assisted" not in out


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
    assert all(cell["same text"] == 1.0 for cell in found.by_group["overall"].values())
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

    def difference(own, theirs, temperature=0.0):
        alone = SimpleNamespace(tokens=own, options=Options("ar", temperature=temperature))
        return check.first_difference(single, precise, prompt, alone, theirs)

    single = random_llama(0).float()
    single.load_state_dict(precise.state_dict())
    gap, error = difference([7, 5], [9, 5])
    assert gap == 0.0 < error < 1e-4
    assert difference([7], [7, 5]) == (inf, 0.0) and difference([7, 5], [7, 5]) is None
    assert check.explain([(gap, error)])[1] and check.explain([]) == ("identical", True)
    assert not check.explain([(gap, error), difference([7], [least])])[1]
    # Above T = 0 the noise tells the two apart.
    assert not check.explain([difference([7], [9], temperature=0.5)])[1]


@pytest.mark.parametrize("temperature", [0, 1])
def test_check_exits_with_1_for_a_bug(temperature, questions, monkeypatch, capsys):
    right = comparison.run_ours

    def wrong(*arguments, **options):
        tokens, made = right(*arguments, **options)
        return tokens if made.options.method == "ar" else [*tokens[:2], 99], made

    monkeypatch.setattr(comparison, "run_ours", wrong)
    arguments = [*SMALL, "--methods", "s2d", "s2d:rejection", "--questions", questions, "--check"]
    assert program(bench.main, *arguments, "--temperature", temperature) == 1
    lines = re.findall(r"^7b T=\d (.*: 2 answers compared: .*)", capsys.readouterr().out, re.M)
    bug = "2 answers compared: BUG: 2 of 2 differ by more than rounding explains"
    compared = ["s2d", "s2d:rejection"] if temperature == 0 else ["s2d"]
    assert lines == [f"{method}: {bug}" for method in compared]


def test_each_model_is_loaded_once():
    """A draft for all methods; a target that drafts for itself is the target."""
    folder, draft = WEIGHTS / "mini-7b", WEIGHTS / "mini-draft"
    names = "ar", "sd:exits=2", "s2d:exits=1,4", f"sd:exits=3:draft={folder}"
    found = {name: methods.parse_method(name, draft) for name in names}
    choices = comparison.choose_methods(folder, found)
    assistant = peers.choose_assistant(choices)  # has as many layers as any method's draft
    assert assistant.found.draft == draft and assistant.options.exits == (1, 4)
    alone, one, other, itself = comparison.load_methods(choices, "cpu", "auto").values()
    assert alone.draft is None and one.draft is other.draft
    assert itself.draft is itself.target is alone.target is one.target


def test_the_readme_compares_an_exit_of_ones_own(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "s2d/bench/README.md").read_text(), re.S)
    exec(block, {})
    rows = re.findall(r"^\| (\w+) +\| 1?\d", capsys.readouterr().out, re.M)
    assert rows[:3] == ["ar", "s2d", "own"]
