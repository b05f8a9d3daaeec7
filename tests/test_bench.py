"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import copy
import json
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import ROOT, WEIGHTS, random_llama

from s2d import bench, corpus, generate, specbench, tables
from s2d.check import first_difference, verdict
from s2d.tree import Dynamic

DRAFT = WEIGHTS / "mini-draft"


def test_default_questions_are_held_out_and_in_spec_benchs_form():
    questions = specbench.corpus_questions("held-out", 3)
    assert [specbench.group_of(question) for question in questions] == [group for group in corpus.GROUPS for _ in range(3)]
    assert len({question["question_id"] for question in questions}) == 18
    assert any(len(question["turns"]) > 1 for question in questions)
    for question in questions:
        assert json.loads(json.dumps(question)) == question
        made = next(
            conversation for conversation in corpus.conversations(2, "held-out", [specbench.group_of(question)])
            if conversation.turns[0][0] == question["turns"][0]
        )  # fmt: skip
        assert [turn for turn, _ in made.turns] == question["turns"]


def test_spec_benchs_own_file_is_read(tmp_path):
    path = ROOT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"
    if path.is_file():
        questions = specbench.read_questions(path, 4)
        groups = [specbench.group_of(question) for question in questions]
        assert {group: groups.count(group) for group in corpus.GROUPS} == dict.fromkeys(corpus.GROUPS, 4)
    else:
        print(f"{path} is absent; only a made-up file is read")
    lines = [{"question_id": 1, "category": "coding", "turns": ["a", "b"], "more": 0}, {"question_id": 2, "category": "qa", "turns": ["c"]}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [specbench.group_of(question) for question in specbench.read_questions(tmp_path / "q.jsonl", 9)] == ["mt_bench", "qa"]
    for bad in ("no json", '{"turns": ["a"]}', "[1]"):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(ValueError, match="not in Spec-Bench's question format"):
            specbench.read_questions(tmp_path / "bad.jsonl", 9)


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
    summary = tables.summarise(records)
    assert summary["s2d"]["groups"] == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})
    assert (summary["s2d"]["low"], summary["s2d"]["high"]) == pytest.approx((4 / 3, 4 / 3))
    records.append(record("s2d", "qa", 3, 0, 1.0))  # one slow answer in the third round
    changed = tables.summarise(records)["s2d"]
    assert changed["speedup"] == pytest.approx(4 / 3) and changed["low"] < 1
    assert all(value == 1.0 for value in summary["ar"]["groups"].values())


def test_exits_are_listed_by_depth():
    ours = {"decoding_steps": [1], "exit_counts": [{"12": 3, "6": 1}], "exact": [True], "accepted": [3], "draft_levels": [4]}
    records = [record("ar", "qa", 1, 10, 1.0), record("s2d", "qa", 1, 10, 1.0) | ours]
    assert list(tables.summarise(records)["s2d"]["exits"].items()) == [("6", 0.25), ("12", 0.75)]


def test_tables():
    summary = {
        "ar": {"speedup": 1.0, "low": 1.0, "high": 1.0, "groups": {"qa": 1.0, "overall": 1.0}},
        "s2d": {"speedup": 1.5, "low": 1.4, "high": 1.6, "groups": {"qa": 1.5, "overall": 1.5}, "mat": 4.0, "rate": 0.5,
                "forwards": 6.0, "exits": {"2": 0.75, "4": 0.25}, "draft": 0.3, "target": 0.6, "exact": True},
    }  # fmt: skip
    lines = tables.render(tables.target_table(summary), markdown=False).splitlines()
    assert lines[2].split() == "s2d 1.50 1.50 1.40-1.60 4.00 6.0 50% 2:75% 4:25% 30%/60%/10% yes".split()
    final = tables.final_table({("a", 0.0): summary, ("a", 1.0): {"ar": summary["ar"]}})
    assert final == [["method", "a T=0", "a T=1", "mean"], ["ar", "1.00", "1.00", "1.00"], ["s2d", "1.50 / 4.00", "", "1.50"]]
    assert tables.render(final, markdown=True).splitlines()[1:] == [
        "| --- | --- | --- | --- |", "| ar | 1.00 | 1.00 | 1.00 |", "| s2d | 1.50 / 4.00 |  | 1.50 |",
    ]  # fmt: skip


def test_the_command_beside_transformers(capsys):
    arguments = ["--targets", "7b", "--limit", "1", "--rounds", "1", "--max-new-tokens", "6", "--hf", "--markdown"]
    assert bench.main(arguments) == 0
    output = capsys.readouterr()
    for temperature in "01":
        assert f"mini-7b, T = {temperature}: speedup over ar" in output.out
    for row in ("ar", "sd:exits=2", "sd:exits=4", "mcsd", "s2d", "s2d-tree"):
        assert len(re.findall(rf"^\| {row} \|( [\d.]+ \|){{7}} [\d.]+-[\d.]+ \| [\d.]+ \| [\d.]+ \|.* yes \|$", output.out, re.M)) == 2
        assert re.search(rf"^\| {row} \|( [\d.]+ / [\d.]+ \|){{2}} [\d.]+ \|$", output.out, re.M)
    for row in ("transformers", "transformers assisted", "transformers look-up"):
        assert re.search(rf"^\| {row} \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", output.out, re.M)
    assert "min left here" in output.err


def test_greedy_answers_are_the_same_whatever_the_method(mini, tokenizer):
    draft, target = mini("mini-draft"), mini("mini-7b")
    methods = {text: bench.parse_method(text, draft, DRAFT, WEIGHTS / "mini-7b") for text in ("ar", "s2d", "mcsd", "s2d-tree")}
    questions = specbench.corpus_questions("held-out", 1)[::2]
    rounds = list(bench.measure(target, draft, questions, tokenizer, "vicuna", methods, {}, 0.0, (1, 2), 16, lambda _: None))
    records = [record for records in rounds for record in records]
    assert len(records) == 4 * 2 * len(questions)
    for question in questions:
        answers = {json.dumps(r["tokens"]) for r in records if r["question_id"] == question["question_id"]}
        assert len(answers) == 1
    for each in records:
        assert each["new_tokens"] == [len(tokens) for tokens in each["tokens"]]
        assert all(d + t <= w for d, t, w in zip(each["draft_seconds"], each["target_seconds"], each["wall_time"]))


SMALL = ["--targets", "7b", "--methods", "ar", "s2d", "--temperature", "0", "--limit", "1", "--max-new-tokens", "8"]


def test_records_are_kept_and_resumed_by_whole_rounds(tmp_path, capsys):
    out = ["--out", str(tmp_path / "new")]
    assert bench.main([*SMALL, *out, "--rounds", "1"]) == 0
    before = (tmp_path / "new" / "records.jsonl").read_text()
    assert bench.main([*SMALL, *out, "--rounds", "2", "--resume"]) == 0
    after = (tmp_path / "new" / "records.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3
    first, second = (json.loads(line) for line in after.splitlines()[1:])
    assert {record["round"] for record in first} == {1} and {record["round"] for record in second} == {2}
    assert "0.00-" not in capsys.readouterr().out
    assert bench.main([*SMALL[:-1], "9", *out, "--resume"]) == 2
    assert "was made with other settings" in capsys.readouterr().err
    assert bench.main([*SMALL, "--resume"]) == 2


def test_answer_files_say_what_spec_bench_reads(tmp_path, tokenizer):
    """new_tokens and wall_time by turn, one accept length a step, and texts that its tokenizer counts alike."""
    from transformers import AutoTokenizer

    assert bench.main([*SMALL, "--rounds", "1", "--out", str(tmp_path)]) == 0
    count = AutoTokenizer.from_pretrained(WEIGHTS / "mini-7b")
    for name in ("mini-7b-T0-ar", "mini-7b-T0-s2d"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [line["question_id"] for line in lines] == list(range(6))
        for line in lines:
            [choice] = line["choices"]
            assert line["category"] in (*specbench.MT_BENCH, *corpus.GROUPS)
            assert len(choice["turns"]) == len(choice["new_tokens"]) == len(choice["wall_time"]) == len(choice["decoding_steps"])
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) > 0
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert min(choice["wall_time"]) > 0
            for turn, tokens in zip(choice["turns"], choice["new_tokens"]):
                assert abs(len(count(turn).input_ids) - 1 - tokens) <= 2  # EOS, and where a text was cut


def test_ties_are_told_from_bugs():
    target = random_llama(0)
    with torch.no_grad():
        target.lm_head.weight[7] = target.lm_head.weight[9]  # two tokens that can never be told apart
        target.lm_head.weight[7] *= 1.5
        target.lm_head.weight[9] *= 1.5
    single = copy.deepcopy(target).float()
    prompt = next(p for p in product(range(61), repeat=2) if target(torch.tensor([p]))[0, -1].argmax() in (7, 9))
    tie = first_difference(single, target, list(prompt), [7, 5], [9, 5])
    assert tie[:2] == (0, 0.0) and 0 < tie[2] < 1e-3
    unlikely = target(torch.tensor([prompt]))[0, -1].argmin().item()
    bug = first_difference(single, target, list(prompt), [7], [unlikely])
    assert bug[1] > 1
    assert first_difference(single, target, list(prompt), [7, 5], [7, 5]) is None
    assert first_difference(single, target, list(prompt), [7, 5], [7])[1] == float("inf")  # it stopped too early
    assert verdict([]) == ("identical", True)
    assert verdict([tie, tie]) == ("2 ties by rounding, largest gap 0.0e+00", True)
    assert verdict([tie, bug])[0].startswith("BUG: 2 differences") and verdict([tie, bug])[1] is False


def test_check_exits_with_1_for_a_bug(monkeypatch, capsys):
    assert bench.main([*SMALL, "--rounds", "1", "--check"]) == 0
    assert "mini-7b s2d: identical" in capsys.readouterr().out

    def wrong(*arguments, method, **options):
        output = generate(*arguments, method=method, **options)
        return replace(output, tokens=output.tokens[:3] + [99] * (method == "s2d") + output.tokens[3:-1])

    monkeypatch.setattr(bench, "generate", wrong)
    assert bench.main([*SMALL, "--rounds", "1", "--check"]) == 1
    assert "mini-7b s2d: BUG: 6 differences" in capsys.readouterr().out


def test_interrupted_it_shows_the_rounds_that_were_finished(monkeypatch, capsys):
    calls = []

    def soon(*arguments, **options):
        calls.append(1)
        if len(calls) == 60:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(bench, "generate", soon)
    assert bench.main([*SMALL, "--rounds", "50"]) == 130
    output = capsys.readouterr()
    assert "interrupted" in output.err and re.search(r"^s2d +[\d.]+", output.out, re.M)


def test_sweep_tries_settings_on_training_prompts_best_first(monkeypatch, capsys):
    monkeypatch.setattr(bench, "sweep_methods", lambda draft: ["ar", "s2d:draft_length=1", "s2d:draft_length=6"])
    arguments = ["sweep", "--targets", "7b", "--limit", "1", "--rounds", "1", "--temperature", "0"]
    assert bench.main(arguments) == 0
    rows = re.findall(r"^(ar|s2d:\S+) .* ([\d.]+) +[\d.]+-[\d.]+ ", capsys.readouterr().out, re.M)
    assert len(rows) == 3 and [float(speed) for _, speed in rows] == sorted((float(s) for _, s in rows), reverse=True)
    seen = {question["turns"][0] for question in specbench.corpus_questions("train", 3)}
    assert not seen & {question["turns"][0] for question in specbench.corpus_questions("held-out", 3)}


MISTAKES = [
    (["--targets", "nowhere"], "no model folder at nowhere"),
    (["--methods", "quick"], "unknown method 'quick'"),
    (["--methods", "s2d:stop=nowhere"], "no decision model at nowhere"),
    (["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--draft", "nowhere"], "no model folder at nowhere"),
    (["--device", "tpu9"], "unknown device"),
    (["--temperature", "warm"], "invalid temperatures value: 'warm'"),
    (["--temperature", "-1"], "temperature must be 0 or more"),
    (["--fast"], "unrecognized arguments: --fast"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_one_line(arguments, message, capsys):
    try:
        code = bench.main([*arguments, "--limit", "1"])
    except SystemExit as stopped:  # argparse
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("bench: ") and message in error[0]
