"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import copy
import json
import re
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import ROOT, WEIGHTS, random_llama

from s2d import decode, generate, load_model
from s2d.bench import __main__ as bench
from s2d.bench import agreement, measure, specbench, tables
from s2d.bench import methods as bench_methods
from s2d.bench.check import Difference, first_difference, observe_pass, verdict
from s2d.extras import static
from s2d.model import widened
from s2d.train import corpus
from s2d.tree import Dynamic, TreeAttention
from s2d.weights import save_model

DRAFT = WEIGHTS / "mini-draft"


def test_default_questions_are_held_out_and_in_spec_benchs_form():
    questions = specbench.corpus_questions("held-out", 3)
    assert [specbench.group_of(question) for question in questions] == [
        group for group in corpus.GROUPS for _ in range(3)
    ]
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
        assert {group: groups.count(group) for group in corpus.GROUPS} == dict.fromkeys(
            corpus.GROUPS, 4
        )
    else:
        print(f"{path} is absent; only a made-up file is read")
    lines = [
        {"question_id": 1, "category": "coding", "turns": ["a", "b"], "more": 0},
        {"question_id": 2, "category": "qa", "turns": ["c"]},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [
        specbench.group_of(question)
        for question in specbench.read_questions(tmp_path / "q.jsonl", 9)
    ] == ["mt_bench", "qa"]
    unusual = (
        "one\u2028line\x85still"  # JSON leaves these as they are; they end no line of the file
    )
    line = {"question_id": 1, "category": "qa", "turns": [unusual]}
    (tmp_path / "u.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert specbench.read_questions(tmp_path / "u.jsonl", 9) == [line]
    for bad in ("no json", '{"turns": ["a"]}', "[1]"):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(ValueError, match="not in Spec-Bench's question format"):
            specbench.read_questions(tmp_path / "bad.jsonl", 9)


def test_methods_are_names_with_options(mini):
    parse = lambda text: bench_methods.parse_method(
        text, mini("mini-draft"), DRAFT, WEIGHTS / "mini-7b"
    )[1]  # noqa: E731
    compiled = [
        bench_methods.parse_method(f"sd{text}", None, DRAFT, WEIGHTS)
        for text in ("", ":compile", ":compile:exits=2")
    ]
    assert compiled == [
        (False, {"method": "sd"}),
        (True, {"method": "sd"}),
        (True, {"method": "sd", "exits": [2]}),
    ]
    assert parse("ar") == {"method": "ar"}
    assert parse("sd:exits=2:draft_length=8") == {"method": "sd", "exits": [2], "draft_length": 8}
    assert parse("mcsd:tree=4,2,2,1:init=target") == {
        "method": "mcsd",
        "tree": [4, 2, 2, 1],
        "init": "target",
    }
    assert parse("s2d-tree:tree=4x8x24:stop=0.3") == {
        "method": "s2d-tree",
        "tree": Dynamic(4, 8, 24),
        "stop": 0.3,
    }
    assert parse("s2d:thresholds=.9,.9,0")["thresholds"] == [0.9, 0.9, 0.0]
    for text, message in (
        ("fast", "unknown method 'fast'"),
        ("s2d:speed=9", "no option 'speed'"),
        ("s2d:draft_length=x", "invalid literal"),
        ("s2d-tree:tree=4x8", "a dynamic tree is three numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(text)
    assert bench_methods.default_methods(mini("mini-draft")) == [
        "ar",
        "sd:exits=2",
        "sd:exits=3",
        "sd:exits=4",
        "mcsd",
        "s2d",
        "s2d-tree",
    ]


def test_turns_are_fed_in_order_with_the_answers_before_them(tokenizer):
    prompts = []

    def run(prompt, max_new_tokens):
        prompts.append(prompt)
        return tokenizer.encode(f"answer {len(prompts)}")[1:], 0.5, {"decoding_steps": 2}

    question = {"turns": ["first", "second", "third " * 400]}
    record = measure.answer(run, question, tokenizer, "vicuna", 9, 512)
    assert prompts == [
        tokenizer.encode_chat(["first"]),
        tokenizer.encode_chat(["first", "answer 1", "second"]),
    ]
    assert record["turns"] == ["answer 1", "answer 2"]  # the third turn leaves no room
    assert (record["wall_time"], record["decoding_steps"]) == ([0.5, 0.5], [2, 2])
    assert record["new_tokens"] == [len(tokens) for tokens in record["tokens"]]


def record(method, group, number, tokens, seconds):
    return {
        "method": method,
        "group": group,
        "round": number,
        "new_tokens": [tokens],
        "wall_time": [seconds],
    }


def test_speedups_are_medians_of_ratios_within_a_round():
    """The machine is three times as slow in the second round: ratios do not notice, absolute speeds would."""
    records = []
    for number, slow in ((1, 1.0), (2, 3.0), (3, 1.0)):
        for group, gain in (("qa", 2.0), ("rag", 1.0)):
            records += [
                record("ar", group, number, 10, slow),
                record("s2d", group, number, 10, slow / gain),
            ]
    summary = tables.summarise(records)
    assert summary["s2d"]["groups"] == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})
    assert (summary["s2d"]["low"], summary["s2d"]["high"]) == pytest.approx((4 / 3, 4 / 3))
    records.append(record("s2d", "qa", 3, 0, 1.0))  # one slow answer in the third round
    changed = tables.summarise(records)["s2d"]
    assert changed["speedup"] == pytest.approx(4 / 3) and changed["low"] < 1
    assert all(value == 1.0 for value in summary["ar"]["groups"].values())


def test_exits_are_listed_by_depth():
    ours = {
        "decoding_steps": [1],
        "exit_counts": [{"12": 3, "6": 1}],
        "exact": [True],
        "accepted": [3],
        "draft_levels": [4],
    }
    records = [record("ar", "qa", 1, 10, 1.0), record("s2d", "qa", 1, 10, 1.0) | ours]
    assert list(tables.summarise(records)["s2d"]["exits"].items()) == [("6", 0.25), ("12", 0.75)]


def test_tables():
    summary = {
        "ar": {"speedup": 1.0, "low": 1.0, "high": 1.0, "groups": {"qa": 1.0, "overall": 1.0}},
        "s2d": {"speedup": 1.5, "low": 1.4, "high": 1.6, "groups": {"qa": 1.5, "overall": 1.5}, "mat": 4.0, "rate": 0.5,
                "forwards": 6.0, "exits": {"2": 0.75, "4": 0.25}, "draft": 0.3, "target": 0.6, "exact": True},
    }  # fmt: skip
    lines = tables.render(tables.target_table(summary), markdown=False).splitlines()
    assert (
        lines[2].split()
        == "s2d 1.50 1.50 1.40-1.60 4.00 6.0 50% 2:75% 4:25% 30%/60%/10% yes".split()
    )
    final = tables.final_table({("a", 0.0): summary, ("a", 1.0): {"ar": summary["ar"]}})
    assert final == [
        ["method", "a T=0", "a T=1", "mean"],
        ["ar", "1.00", "1.00", "1.00"],
        ["s2d", "1.50 / 4.00", "", "1.50"],
    ]
    assert tables.render(final, markdown=True).splitlines()[1:] == [
        "| --- | --- | --- | --- |", "| ar | 1.00 | 1.00 | 1.00 |", "| s2d | 1.50 / 4.00 |  | 1.50 |",
    ]  # fmt: skip


def test_the_command_beside_transformers(capsys):
    arguments = [
        "--targets",
        "7b",
        "--limit",
        "1",
        "--rounds",
        "1",
        "--max-new-tokens",
        "6",
        "--hf",
        "--markdown",
    ]
    assert bench.main(arguments) == 0
    output = capsys.readouterr()
    for temperature in "01":
        assert f"mini-7b, T = {temperature}: speedup over ar" in output.out
    for row in ("ar", "sd:exits=2", "sd:exits=4", "mcsd", "s2d", "s2d-tree"):
        assert (
            len(
                re.findall(
                    rf"^\| {row} \|( [\d.]+ \|){{7}} [\d.]+-[\d.]+ \| [\d.]+ \| [\d.]+ \|.* yes \|$",
                    output.out,
                    re.M,
                )
            )
            == 2
        )
        assert re.search(rf"^\| {row} \|( [\d.]+ / [\d.]+ \|){{2}} [\d.]+ \|$", output.out, re.M)
    for row in ("transformers", "transformers assisted", "transformers look-up"):
        assert re.search(rf"^\| {row} \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", output.out, re.M)
    assert "min left here" in output.err


def test_greedy_answers_are_the_same_whatever_the_method(mini, tokenizer):
    draft, target = mini("mini-draft"), mini("mini-7b")
    methods = {
        text: bench_methods.parse_method(text, draft, DRAFT, WEIGHTS / "mini-7b")
        for text in ("ar", "s2d", "mcsd", "s2d-tree")
    }
    questions = specbench.corpus_questions("held-out", 1)[::2]
    rounds = list(
        measure.measure(
            {False: (target, draft)},
            questions,
            tokenizer,
            "vicuna",
            methods,
            {},
            0.0,
            (1, 2),
            16,
            lambda _: None,
        )
    )
    records = [record for records in rounds for record in records]
    assert len(records) == 4 * 2 * len(questions)
    for question in questions:
        answers = {
            json.dumps(r["tokens"]) for r in records if r["question_id"] == question["question_id"]
        }
        assert len(answers) == 1
    for each in records:
        assert each["new_tokens"] == [len(tokens) for tokens in each["tokens"]]
        assert all(
            d + t <= w
            for d, t, w in zip(each["draft_seconds"], each["target_seconds"], each["wall_time"])
        )


def test_no_method_always_follows_the_same_one(mini, tokenizer, monkeypatch):
    order, methods = [], {name: (False, {"method": "ar"}) for name in "abcdef"}

    def runners(methods, *_):
        return {
            name: lambda *_, name=name: (order.append(name), ([5], 1.0, {}))[1] for name in methods
        }

    monkeypatch.setattr(measure, "runners", runners)
    questions = specbench.corpus_questions("held-out", 2)
    assert (
        len(
            list(
                measure.measure(
                    {False: (mini("mini-7b"), None)},
                    questions,
                    tokenizer,
                    "vicuna",
                    methods,
                    {},
                    0.0,
                    (1, 2),
                    4,
                    lambda _: None,
                )
            )
        )
        == 2
    )
    turns = [len(question["turns"]) for question in questions]
    assert len(order) == 6 * (turns[0] + 2 * sum(turns))
    before = {(a, b) for a, b in zip(order, order[1:]) if a != b}
    assert all(len({a for a, b in before if b == name}) >= 4 for name in methods)


SMALL = [
    "--targets",
    "7b",
    "--methods",
    "ar",
    "s2d",
    "--temperature",
    "0",
    "--limit",
    "1",
    "--max-new-tokens",
    "8",
]


def test_compiled_methods_stand_beside_the_others(monkeypatch, capsys):
    monkeypatch.setattr(static, "ROWS", (1,))
    assert bench.main([*SMALL, "--rounds", "1", "--compile", "--check"]) == 0
    output = capsys.readouterr().out
    assert re.findall(r"^(\S+) +[\d.]+ / ", output, re.M) == [
        "ar",
        "ar:compile",
        "s2d",
        "s2d:compile",
    ]
    for method in ("ar:compile", "s2d", "s2d:compile"):
        assert re.search(rf"^mini-7b {method}: identical; logits", output, re.M)


def test_agreement_is_what_a_plain_count_says(mini, tokenizer, capsys):
    """Beside logits over the whole vocabulary, place by place, without and with a draft vocabulary."""
    target, draft = mini("mini-7b"), load_model(DRAFT, dtype="float64")
    prompt = specbench.held_out_prompts(tokenizer, 1)[0]
    answer = generate(target, prompt, method="ar", max_new_tokens=20).tokens
    for kept in (torch.arange(1024), torch.tensor(sorted(set(answer[::2])))):
        draft.keep_tokens(kept)
        right = agreement.exits_right(draft, (2, 3, 4), prompt, answer)
        for row, exit_layer in zip(right.tolist(), (2, 3, 4)):
            for place, token in enumerate(answer):
                hidden = draft.run_layers(
                    draft.embed(torch.tensor([prompt + answer[:place]])), stop=exit_layer
                )
                assert row[place] == (
                    kept[draft.logits(hidden[0, -1])[kept].argmax()].item() == token
                )
    arguments = [
        "agreement",
        "--target",
        str(WEIGHTS / "mini-7b"),
        "--limit",
        "1",
        "--max-new-tokens",
        "8",
    ]
    assert bench.main(arguments) == 0
    rows = re.findall(r"^(\S+) +([\d.]+)% +([\d.]+)% +([\d.]+)%$", capsys.readouterr().out, re.M)
    assert [name for name, *_ in rows] == ["untrained", "mini-draft"] and float(rows[0][1]) < float(
        rows[1][1]
    )


def test_records_are_kept_and_resumed_by_whole_rounds(tmp_path, capsys):
    out = ["--out", str(tmp_path / "new")]
    assert bench.main([*SMALL, *out, "--rounds", "1"]) == 0
    before = (tmp_path / "new" / "records.jsonl").read_text()
    assert bench.main([*SMALL, *out, "--rounds", "2", "--resume"]) == 0
    after = (tmp_path / "new" / "records.jsonl").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 3
    first, second = (json.loads(line) for line in after.splitlines()[1:])
    assert {record["round"] for record in first} == {1} and {
        record["round"] for record in second
    } == {2}
    assert "0.00-" not in capsys.readouterr().out
    assert bench.main([*SMALL[:-1], "9", *out, "--resume"]) == 2
    assert "was made with other settings" in capsys.readouterr().err
    assert bench.main([*SMALL, "--resume"]) == 2
    capsys.readouterr()
    assert bench.main([*SMALL, *out]) == 2  # nothing that was measured is written over
    assert "is not empty; go on with --resume" in capsys.readouterr().err
    assert (tmp_path / "new" / "records.jsonl").read_text() == after
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    save_model(load_model(draft, dtype="float32"), tmp_path / "other-draft", tokenizer_from=draft)
    changed = load_model(draft)
    changed.model["norm"].weight.mul_(1.5)
    save_model(changed, tmp_path / "changed-draft", tokenizer_from=draft)
    assert (
        bench.main(
            [*SMALL, *out, "--rounds", "2", "--resume", "--draft", str(tmp_path / "other-draft")]
        )
        == 0
    )
    capsys.readouterr()
    assert (
        bench.main(
            [*SMALL, *out, "--rounds", "2", "--resume", "--draft", str(tmp_path / "changed-draft")]
        )
        == 2
    )
    assert "was made with other settings: draft " in capsys.readouterr().err


def test_a_line_cut_short_by_a_kill_is_measured_again(tmp_path, capsys):
    out = ["--out", str(tmp_path / "new"), "--rounds", "2"]
    assert bench.main([*SMALL, *out]) == 0
    file = tmp_path / "new" / "records.jsonl"
    whole = file.read_text()
    file.write_text(whole[: -len(whole) // 4])
    assert bench.main([*SMALL, *out, "--resume"]) == 0
    settings, *rounds = map(json.loads, file.read_text().splitlines())
    assert [{record["round"] for record in records} for records in rounds] == [{1}, {2}]
    assert file.read_text().startswith("\n".join(whole.splitlines()[:2]) + "\n")
    file.write_text("{broken\n" + whole)
    capsys.readouterr()
    assert bench.main([*SMALL, *out, "--resume"]) == 2
    assert "is damaged; name another folder" in capsys.readouterr().err


def test_targets_of_the_same_name_are_kept_apart(tmp_path, capsys):
    """Two folders called model are two rows; on resuming, one whose weights have changed is refused."""
    for place, name in (("a", "mini-7b"), ("b", "mini-13b")):
        shutil.copytree(WEIGHTS / name, tmp_path / place / "model")
    targets = ",".join(str(tmp_path / place / "model") for place in "ab")
    arguments = [*SMALL[2:], "--targets", targets, "--rounds", "1", "--out", str(tmp_path / "out")]
    assert bench.main(arguments) == 0
    table = capsys.readouterr().out
    assert f"{tmp_path}/a/model T=0" in table and f"{tmp_path}/b/model T=0" in table
    shutil.rmtree(tmp_path / "a/model")
    shutil.copytree(WEIGHTS / "mini-13b", tmp_path / "a/model")
    assert bench.main([*arguments, "--resume"]) == 2
    assert "whose weights were different" in capsys.readouterr().err


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
            assert (
                len(choice["turns"])
                == len(choice["new_tokens"])
                == len(choice["wall_time"])
                == len(choice["decoding_steps"])
            )
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) > 0
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert min(choice["wall_time"]) > 0
            for turn, tokens in zip(choice["turns"], choice["new_tokens"]):
                assert (
                    abs(len(count(turn).input_ids) - 1 - tokens) <= 2
                )  # EOS, and where a text was cut


def test_ties_are_told_from_bugs():
    """By the gap in float64, and by how far the target's own pass is off at the two tokens concerned."""
    target = random_llama(0)
    with torch.no_grad():
        target.lm_head.weight[7] = target.lm_head.weight[
            9
        ]  # two tokens that can never be told apart
        target.lm_head.weight[7] *= 1.5
        target.lm_head.weight[9] *= 1.5
    single, draft = copy.deepcopy(target).float(), random_llama(1).float()
    passes = [observe_pass(single, single, draft, dict(method="mcsd"), [5, n], n) for n in range(4)]
    prompt = next(
        p
        for p in product(range(61), repeat=2)
        if target(torch.tensor([p]))[0, -1].argmax() in (7, 9)
    )
    difference = lambda *answers: first_difference(single, list(prompt), *answers)  # noqa: E731
    tie = difference([7, 5], [9, 5])
    assert (tie.tokens, tie.a, tie.b) == (list(prompt), 7, 9)
    text, good = verdict(target, passes, [tie, tie])
    assert text.startswith("2 ties by rounding, largest gap 0.0e+00; logits ") and good is True
    unlikely = target(torch.tensor([prompt]))[0, -1].argmin().item()
    text, good = verdict(target, passes, [tie, difference([7], [unlikely])])
    assert (
        text.startswith("BUG: ")
        and "2 different answers, 1 by more than rounding explains" in text
        and good is False
    )
    assert difference([7, 5], [7, 5]) is None
    assert verdict(target, passes, [difference([7, 5], [7])])[1] is False  # it stopped too early
    assert (
        verdict(target, passes, [])[0].startswith("identical; ")
        and verdict(target, passes, [])[1] is True
    )
    # The same gap with noise at the two tokens, at others only, and none: a tie, in doubt, a bug.
    gap = target(torch.tensor([prompt]))[0, -1, [7, 8]].diff().abs().item()
    exact = target(torch.tensor([prompt]))[0, -1, [7, 8]]
    noisy = [replace(p, plain=p.plain + 0.6 * gap, checked=p.checked + 0.6 * gap) for p in passes]
    for noise, own, expected in ((0.4, passes, False), (0.6, passes, True), (0.0, noisy, None)):
        assert (
            verdict(target, own, [Difference(list(prompt), 7, 8, exact + noise * gap)])[1]
            is expected
        )


def hidden_token(mask, tree, n):
    mask[:, 50] = -torch.inf


def node_sees_sibling(mask, tree, n):
    parents = tree.parents.tolist()
    for node, sibling in product(range(len(tree)), repeat=2):
        if sibling < node and parents[node] == parents[sibling]:
            mask[len(mask) - len(tree) + node, n + sibling] = 0


def position_off_by_one(positions, tree):
    positions[len(positions) - len(tree) :] += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planted_bugs_are_found_in_the_passes(dtype, mini, tokenizer, monkeypatch):
    """Each is called a bug, or in doubt, in either precision; the right passes are as good as plain ones."""
    target, draft = (load_model(WEIGHTS / name, dtype=dtype) for name in ("mini-7b", "mini-draft"))
    prompts, score, span = (
        specbench.held_out_prompts(tokenizer, 1),
        decode._score,
        TreeAttention.span,
    )

    def judged(change_mask=lambda *_: None, change_positions=lambda *_: None):
        def wrong_score(target, context, tree, attention, cache, after_context):
            def wrong_span(self, n, start, end):
                positions, mask = span(self, n, start, end)
                if positions is None or start == 0:
                    return positions, mask
                mask = widened(mask, end).clone()
                change_mask(mask, tree, n)
                change_positions(positions, tree)
                return positions, mask

            with monkeypatch.context() as patch:
                patch.setattr(TreeAttention, "span", wrong_span if len(tree) else span)
                return score(target, context, tree, attention, cache, after_context)

        with monkeypatch.context() as patch:
            patch.setattr(decode, "_score", wrong_score)
            passes = [
                observe_pass(target, target, draft, dict(method="mcsd"), prompt, 1)
                for prompt in prompts
            ]
        return verdict(mini("mini-7b"), passes, [])[1]

    assert judged() is True
    for bug in (hidden_token, node_sees_sibling):
        assert judged(change_mask=bug) is not True, bug
    assert judged(change_positions=position_off_by_one) is False


def test_check_exits_with_1_for_a_bug(monkeypatch, capsys):
    assert bench.main([*SMALL, "--rounds", "1", "--check"]) == 0
    assert "mini-7b s2d: identical; logits" in capsys.readouterr().out
    assert bench.main([*SMALL, "--methods", "ar", "--rounds", "1", "--check"]) == 0

    def wrong(*arguments, method, **options):
        output = generate(*arguments, method=method, **options)
        return replace(
            output, tokens=output.tokens[:3] + [99] * (method == "s2d") + output.tokens[3:-1]
        )

    monkeypatch.setattr(measure, "generate", wrong)
    assert bench.main([*SMALL, "--rounds", "1", "--check"]) == 1
    assert re.search(
        "mini-7b s2d: BUG: .* 6 different answers, 6 by more than rounding explains",
        capsys.readouterr().out,
    )


def test_interrupted_it_shows_the_rounds_that_were_finished(monkeypatch, capsys):
    calls = []

    def soon(*arguments, **options):
        calls.append(1)
        if len(calls) == 60:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(measure, "generate", soon)
    assert bench.main([*SMALL, "--rounds", "50"]) == 130
    output = capsys.readouterr()
    assert "interrupted" in output.err and re.search(r"^s2d +[\d.]+", output.out, re.M)


def test_sweep_tries_settings_on_training_prompts_best_first(monkeypatch, capsys):
    monkeypatch.setattr(
        bench, "sweep_methods", lambda draft: ["ar", "s2d:draft_length=1", "s2d:draft_length=6"]
    )
    arguments = ["sweep", "--targets", "7b", "--limit", "1", "--rounds", "1", "--temperature", "0"]
    assert bench.main(arguments) == 0
    rows = re.findall(r"^(ar|s2d:\S+) .* ([\d.]+) +[\d.]+-[\d.]+ ", capsys.readouterr().out, re.M)
    assert len(rows) == 3 and [float(speed) for _, speed in rows] == sorted(
        (float(s) for _, s in rows), reverse=True
    )
    seen = {question["turns"][0] for question in specbench.corpus_questions("train", 3)}
    assert not seen & {
        question["turns"][0] for question in specbench.corpus_questions("held-out", 3)
    }


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


@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES]
)
def test_mistakes_are_one_line(arguments, message, capsys):
    try:
        code = bench.main([*arguments, "--limit", "1"])
    except SystemExit as stopped:  # argparse
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("bench: ") and message in error[0]
