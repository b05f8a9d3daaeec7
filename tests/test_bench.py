"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import json
import re

import pytest
from helpers import ROOT, WEIGHTS

from s2d import bench, corpus
from s2d.tree import Dynamic

DRAFT = WEIGHTS / "mini-draft"


def test_default_questions_are_held_out_and_in_spec_benchs_form():
    questions = bench.held_out_questions(3)
    assert [bench.group_of(question) for question in questions] == [group for group in corpus.GROUPS for _ in range(3)]
    assert len({question["question_id"] for question in questions}) == 18
    assert any(len(question["turns"]) > 1 for question in questions)
    for question in questions:
        assert json.loads(json.dumps(question)) == question
        made = next(
            conversation for conversation in corpus.conversations(2, "held-out", [bench.group_of(question)])
            if conversation.turns[0][0] == question["turns"][0]
        )  # fmt: skip
        assert [turn for turn, _ in made.turns] == question["turns"]


def test_spec_benchs_own_file_is_read(tmp_path):
    path = ROOT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"
    if path.is_file():
        questions = bench.read_questions(path, 4)
        groups = [bench.group_of(question) for question in questions]
        assert {group: groups.count(group) for group in corpus.GROUPS} == dict.fromkeys(corpus.GROUPS, 4)
    else:
        print(f"{path} is absent; only a made-up file is read")
    lines = [{"question_id": 1, "category": "coding", "turns": ["a", "b"], "more": 0}, {"question_id": 2, "category": "qa", "turns": ["c"]}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [bench.group_of(question) for question in bench.read_questions(tmp_path / "q.jsonl", 9)] == ["mt_bench", "qa"]
    for bad in ("no json", '{"turns": ["a"]}', "[1]"):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(ValueError, match="not in Spec-Bench's question format"):
            bench.read_questions(tmp_path / "bad.jsonl", 9)


def test_methods_are_names_with_options(mini):
    parse = lambda text: bench.parse_method(text, mini("mini-draft"), DRAFT, WEIGHTS / "mini-7b")  # noqa: E731
    assert parse("ar") == {"method": "ar"}
    assert parse("sd:exits=2:draft_length=8") == {"method": "sd", "exits": [2], "draft_length": 8}
    assert parse("mcsd:tree=4,2,2,1:init=target") == {"method": "mcsd", "tree": [4, 2, 2, 1], "init": "target"}
    assert parse("s2d-tree:tree=4x8x24:stop=0.3") == {"method": "s2d-tree", "tree": Dynamic(4, 8, 24), "stop": 0.3}
    assert parse("s2d:thresholds=.9,.9,0")["thresholds"] == [0.9, 0.9, 0.0]
    for text, message in (
        ("fast", "unknown method 'fast'"),
        ("s2d:speed=9", "no option 'speed'"),
        ("s2d:draft_length=x", "invalid literal"),
        ("s2d-tree:tree=4x8", "a dynamic tree is three numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text)
    assert bench.default_methods(mini("mini-draft")) == ["ar", "sd:exits=2", "sd:exits=3", "sd:exits=4", "mcsd", "s2d", "s2d-tree"]


def test_turns_are_fed_in_order_with_the_answers_before_them(tokenizer):
    prompts = []

    def run(prompt, max_new_tokens):
        prompts.append(prompt)
        return tokenizer.encode(f"answer {len(prompts)}")[1:], 0.5, {"decoding_steps": 2}

    question = {"turns": ["first", "second", "third " * 400]}
    record = bench.answer(run, question, tokenizer, "vicuna", 9, 512)
    assert prompts == [tokenizer.encode_chat(["first"]), tokenizer.encode_chat(["first", "answer 1", "second"])]
    assert record["turns"] == ["answer 1", "answer 2"]  # the third turn leaves no room
    assert (record["wall_time"], record["decoding_steps"]) == ([0.5, 0.5], [2, 2])
    assert record["new_tokens"] == [len(tokens) for tokens in record["tokens"]]


def record(method, group, number, tokens, seconds):
    return {"method": method, "group": group, "round": number, "new_tokens": [tokens], "wall_time": [seconds]}


def test_speedups_are_medians_of_ratios_within_a_round():
    """The machine is three times as slow in the second round: ratios do not notice, absolute speeds would."""
    records = []
    for number, slow in ((1, 1.0), (2, 3.0), (3, 1.0)):
        for group, gain in (("qa", 2.0), ("rag", 1.0)):
            records += [record("ar", group, number, 10, slow), record("s2d", group, number, 10, slow / gain)]
    summary = bench.summarise(records)
    assert summary["s2d"]["groups"] == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})
    assert (summary["s2d"]["low"], summary["s2d"]["high"]) == pytest.approx((4 / 3, 4 / 3))
    records.append(record("s2d", "qa", 3, 0, 1.0))  # one slow answer in the third round
    changed = bench.summarise(records)["s2d"]
    assert changed["speedup"] == pytest.approx(4 / 3) and changed["low"] < 1
    assert all(value == 1.0 for value in summary["ar"]["groups"].values())


def test_tables():
    summary = {
        "ar": {"speedup": 1.0, "low": 1.0, "high": 1.0, "groups": {"qa": 1.0, "overall": 1.0}},
        "s2d": {"speedup": 1.5, "low": 1.4, "high": 1.6, "groups": {"qa": 1.5, "overall": 1.5}, "mat": 4.0, "rate": 0.5,
                "forwards": 6.0, "exits": {2: 0.75, 4: 0.25}, "draft": 0.3, "target": 0.6, "exact": True},
    }  # fmt: skip
    lines = bench.render(bench.target_table(summary), markdown=False).splitlines()
    assert lines[2].split() == "s2d 1.50 1.50 1.40-1.60 4.00 50% 2:75% 4:25% 30%/60%/10% yes".split()
    final = bench.final_table({("a", 0.0): summary, ("a", 1.0): {"ar": summary["ar"]}})
    assert final == [["method", "a T=0", "a T=1", "mean"], ["ar", "1.00", "1.00", "1.00"], ["s2d", "1.50 / 4.00", "", "1.50"]]
    assert bench.render(final, markdown=True).splitlines()[1:] == [
        "| --- | --- | --- | --- |", "| ar | 1.00 | 1.00 | 1.00 |", "| s2d | 1.50 / 4.00 |  | 1.50 |",
    ]  # fmt: skip


def test_the_command_beside_transformers(capsys):
    arguments = ["--targets", "7b", "--limit", "1", "--rounds", "1", "--max-new-tokens", "6", "--hf", "--markdown"]
    assert bench.main(arguments) == 0
    output = capsys.readouterr()
    for temperature in "01":
        assert f"mini-7b, T = {temperature}: speedup over ar" in output.out
    for row in ("ar", "sd:exits=2", "sd:exits=4", "mcsd", "s2d", "s2d-tree"):
        assert len(re.findall(rf"^\| {row} \|( [\d.]+ \|){{7}} [\d.]+-[\d.]+ \| [\d.]+ \|.* yes \|$", output.out, re.M)) == 2
        assert re.search(rf"^\| {row} \|( [\d.]+ / [\d.]+ \|){{2}} [\d.]+ \|$", output.out, re.M)
    for row in ("transformers", "transformers assisted", "transformers look-up"):
        assert re.search(rf"^\| {row} \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", output.out, re.M)
    assert "min left here" in output.err


def test_greedy_answers_are_the_same_whatever_the_method(mini, tokenizer):
    draft, target = mini("mini-draft"), mini("mini-7b")
    methods = {text: bench.parse_method(text, draft, DRAFT, WEIGHTS / "mini-7b") for text in ("ar", "s2d", "mcsd", "s2d-tree")}
    questions = bench.held_out_questions(1)[::2]
    records = list(bench.measure(target, draft, questions, tokenizer, "vicuna", methods, {}, 0.0, 2, 16, lambda _: None))
    assert len(records) == 4 * 2 * len(questions)
    for question in questions:
        answers = {json.dumps(r["tokens"]) for r in records if r["question_id"] == question["question_id"]}
        assert len(answers) == 1
    for each in records:
        assert each["new_tokens"] == [len(tokens) for tokens in each["tokens"]]
        assert all(d + t <= w for d, t, w in zip(each["draft_seconds"], each["target_seconds"], each["wall_time"]))


MISTAKES = [
    (["--targets", "nowhere"], "no model folder at nowhere"),
    (["--methods", "quick"], "unknown method 'quick'"),
    (["--methods", "s2d:stop=nowhere"], "no decision model at nowhere"),
    (["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--draft", "nowhere"], "no model folder at nowhere"),
    (["--device", "tpu9"], "unknown device"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_one_line(arguments, message, capsys):
    assert bench.main([*arguments, "--limit", "1"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("bench: ") and message in error[0]
