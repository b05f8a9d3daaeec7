"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import json
import re
import time
from collections import Counter
from functools import partial
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

from s2d import generate
from s2d.bench import __main__ as bench
from s2d.bench import check, measure, methods, peers, specbench, speed, tables
from s2d.bench.measure import Record, Turn
from s2d.checkpoint import save_model
from s2d.checkpoint.pair import load_pair
from s2d.decoder import Stats
from s2d.options import Options
from s2d.train import corpus
from s2d.tree import GrowingShape

HERE = dict(device="cpu", dtype="auto")
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
    for bad in ("no json", "[1]", '{"turns": ["a"]}', json.dumps(good | {"turns": "abc"})):
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
        "s2d:decision=file": {"decision": Path("in/file")},
        "s2d:draft=other": {"draft": Path("in/other")},
        "s2d-tree:exits=0": {"exits": (0,), "draft": None},
    }
    for text, options in asked.items():
        method = methods.parse_method(text, Path("draft"), Path("in"))
        expected = {"method": text.split(":")[0], "init": "draft", "rule": "noise"}
        expected |= {"draft": Path("draft"), **options}
        assert method.options | {"draft": method.draft} == expected
    for text, message in (
        ("fast", "method fast: argument --method: invalid choice: 'fast'"),
        ("s2d:speed=9", "method s2d:speed=9: unrecognized arguments: --speed=9"),
        ("s2d:draft_length=x", "argument --draft-length: invalid int value: 'x'"),
        (
            "s2d-tree:tree=4x8",
            "argument --tree: expected widths, such as 4,2,2,1, or a growing tree",
        ),
    ):
        refuses(bench.main, capsys, message, "--methods", text)


def test_turns_are_asked_in_order_with_the_answers_before_them(tokenizer):
    """One fills its context in its second turn."""
    asked = []

    def run(prompt, seed):
        asked.append((prompt, seed))
        return tokenizer.encode(f"answer {len(asked)}")[1:], None

    one, two = {"turns": ["first", "second"]}, {"turns": ["a", "word " * 400, "c"]}
    first = measure.answer(tokenizer, 512, run, one, 9)
    messages = (["first"], ["first", "answer 1", "second"])
    assert [turn.prompt for turn in first] == [tokenizer.encode_chat(each) for each in messages]
    assert asked == [(turn.prompt, 9) for turn in first]
    assert [turn.text for turn in first] == ["answer 1", "answer 2"]
    assert [turn.text for turn in measure.answer(tokenizer, 512, run, two, 10)] == ["answer 3"]


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
    turn = Turn([], [5] * tokens, "", seconds, generation)
    return Record(number, method, {"group": group}, [turn])


def test_speedups_are_medians_of_ratios_within_a_round():
    """The machine is three times as slow in the second round: only absolute speeds would notice."""
    records = []
    for number, slow in ((1, 1.0), (2, 3.0), (3, 1.0)):
        for group, gain in (("qa", 2.0), ("rag", 1.0)):
            records.append(record("ar", group, number, 10, slow))
            records.append(record("s2d", group, number, 10, slow / gain))
    result = tables.summarise(records)
    speedups = {group: result[group]["s2d"]["speedup"] for group in ("qa", "rag", "overall")}
    assert speedups == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})
    overall = result["overall"]["s2d"]
    assert [overall["lowest"], overall["highest"]] == pytest.approx([4 / 3, 4 / 3])
    records.append(record("s2d", "qa", 3, 0, 1.0))  # one slow answer in the third round
    changed = tables.summarise(records)
    assert changed["overall"]["s2d"]["speedup"] == pytest.approx(4 / 3)
    assert changed["overall"]["s2d"]["lowest"] < 1


def test_a_table_of_what_was_accepted():
    target, draft = nearly_equal(3)
    records = [record("ar", "qa", 1, 10, 0.5), record("transformers", "qa", 1, 10, 0.5)]
    alone = generate(target, [1, 2], method="ar", max_new_tokens=9)
    records[0] = record("ar", "qa", 1, 10, 0.5, alone)
    for exits, length in (([2, 4], 3), ([4], 2)):
        options = dict(exits=exits, draft_length=length, thresholds=[0.0] * len(exits))
        for prompt in ([1, 2], [3, 4]):
            found = generate(target, prompt, draft, max_new_tokens=9, **options)
            records.append(record(f"s2d of {len(exits)}", "qa", 1, 10, 0.5, found))
    header, two, one = tables.acceptance_table(records)
    assert header == ["", "1", "2", "3", "exit 2", "exit 4"]
    assert two[0] == "s2d of 2" and one[0] == "s2d of 1" and one[3] == one[4] == ""
    asked, sure, drafted, accepted = map(int, two[4].split(" / "))
    assert asked == sure == drafted >= accepted  # the sums of both answers
    stats = [each.turns[0].generation.stats for each in records[2:4]]
    assert drafted == sum(each.draft_tokens for each in stats)
    assert accepted == sum(each.accepted_tokens for each in stats)
    first = sum(each.depth_accepted[1] for each in stats)
    assert two[1] == f"{first / sum(each.depth_sent[1] for each in stats):.0%}"
    assert two[5] == "0 / 0 / 0 / 0"


def test_tables():
    stats = Stats([4] * 5, Counter({12: 3, 6: 9}), draft_levels=20, accepted_tokens=15)
    stats.draft_seconds, stats.target_seconds, stats.seconds = 0.3, 0.6, 1.0
    ours = SimpleNamespace(stats=stats)
    records = [record("ar", "qa", 1, 10, 0.5), record("s2d", "qa", 1, 20, 1.0, ours)]
    records += [record("ar", "qa", 2, 10, 1.0), record("s2d", "qa", 2, 20, 1.0, ours)]
    result = tables.summarise(records)
    columns = result | dict.fromkeys(tables.DETAILS, result["overall"])
    lines = tables.render(tables.table(columns, ("speedup", "mat"))).splitlines()
    expected = "s2d 1.50 / 4.00 1.50 / 4.00 1.00 2.00 20.0 0% 75% 7.5 30%"
    assert lines[2].split() == expected.split()
    final = {"a T=0": result["overall"], "a T=1": {"ar": result["overall"]["ar"]}}
    rows = ["|  | a T=0 | a T=1 | mean |", "| --- | --- | --- | --- |"]
    rows += ["| ar | 1.00 | 1.00 | 1.00 |", "| s2d | 1.50 / 4.00 |  | 1.50 / 4.00 |"]
    made = tables.table(final, ("speedup", "mat"), means=True)
    assert tables.render(made, markdown=True).splitlines() == rows


def test_the_best_of_several_rows_is_chosen_in_each_column():
    """Afterwards, by speedup alone; such as the best single exit in a group of tasks."""
    speedups = {"qa": (1.5, 2.0, 1.8), "rag": (3.0, 2.0, 3.5)}
    result = {}
    for group, values in speedups.items():
        names = ("sd:exits=2", "sd:exits=3", "s2d")
        result[group] = {row: {"speedup": each} for row, each in zip(names, values)}
    chosen = tables.add_best(result, ["sd:exits=2", "sd:exits=3"], "sd, best exit")
    assert chosen == {"qa": "sd:exits=3", "rag": "sd:exits=2"}
    best = {group: column["sd, best exit"]["speedup"] for group, column in result.items()}
    assert best == {"qa": 2.0, "rag": 3.0} and len(result["qa"]) == 4


def test_clocks_span_the_whole_call(mini, tokenizer):
    """Ours, and that of transformers: what happens before the first step and after the last."""
    options = Options("ar", max_new_tokens=2)
    pair = load_pair(WEIGHTS / "mini-7b", options=options)
    run = partial(measure.run_ours, pair=pair)
    [turn] = measure.answer(tokenizer, 512, run, {"turns": ["Hi"]}, 0)
    seconds = turn.generation.stats.seconds
    assert seconds < turn.seconds < seconds + 1

    class Peer:
        device, config = "cpu", SimpleNamespace(max_position_embeddings=512)

        def generate(self, tokens, **options):
            time.sleep(0.02)
            return torch.cat([tokens, torch.tensor([[5, 6]])], dim=1)

    run = partial(peers.run_peer, peer=Peer(), max_new_tokens=2)
    [turn] = measure.answer(tokenizer, 512, run, {"turns": ["Hi"]}, 0)
    assert turn.tokens == [5, 6] and turn.seconds > 0.02


def test_the_whole_command(questions, tmp_path, capsys):
    """With transformers, whose greedy text is the target's own, and a picture."""
    options = ["--methods", "s2d", "sd:exits=2", "sd:exits=3", "--hf", "--check", "--markdown"]
    options += ["--questions", questions]
    files = ["--plot", tmp_path / "speed.svg", "--out", tmp_path / "out"]
    assert program(bench.main, *SMALL, "--temperature", "0,1", *options, *files) == 0
    output = capsys.readouterr().out
    ours = ["ar", "s2d", "sd:exits=2", "sd:exits=3"]
    assisted = "transformers assisted"
    settings = [f"{assisted}:tokens={n}:threshold={p:g}" for n, p in peers.SETTINGS]
    best = ["sd, best exit", f"{assisted}, best setting"]
    each = [*ours, "transformers", assisted, *settings, "transformers look-up", *best]
    names = [name for name in each if name not in settings]
    rows = re.findall(r"^\| (\w[^|]+) \| [\d.]+ ", output, re.M)
    assert rows == [*each, *each, *names]  # at both temperatures, and in the last table
    for T, (name, among) in product((0, 1), zip(best, (ours[2:], [assisted, *settings]))):
        [chosen] = re.findall(f"^mini-7b T={T}: {name} is (.+)$", output, re.M)
        assert chosen in among
    rows = re.findall(r"^\| (\w[^|]+) \| \d+% ", output, re.M)
    assert rows == 2 * ours[1:]  # what was accepted
    for temperature, method in product((0, 1), ours[1:]):
        assert f"mini-7b T={temperature} {method}: 2 answers compared: identical" in output
    assert (tmp_path / "speed.svg").read_text().count("<path") > len(names)
    texts = set()
    for name in ("ar", "s2d", *(row.replace(" ", "-") for row in ("transformers", assisted))):
        lines = (tmp_path / "out" / f"mini-7b-T0-{name}.jsonl").read_text().splitlines()
        texts.add(json.dumps([json.loads(line)["choices"][0]["turns"] for line in lines]))
    assert len(texts) == 1


def test_answer_files_say_what_spec_bench_reads(questions, tmp_path, capsys):
    """Lists by turn, and an accept length per step."""
    arguments = [*SMALL, "--methods", "s2d", "--temperature", "0", "--questions", questions]
    arguments += ["--rounds", "2", "--out", tmp_path / "out"]
    assert program(bench.main, *arguments) == 0
    for name in ("mini-7b-T0-ar", "mini-7b-T0-s2d"):
        lines = (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()
        lines = list(map(json.loads, lines))
        asked = [(line["question_id"], line["category"]) for line in lines]
        assert asked == [(7, "qa"), (9, "coding")]
        assert [len(line["choices"][0]["turns"]) for line in lines] == [1, 2]
        for [choice] in (line["choices"] for line in lines):
            by_turn = ("turns", "new_tokens", "wall_time", "decoding_steps")
            assert len({len(choice[key]) for key in by_turn}) == 1 and min(choice["wall_time"]) > 0
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) > 0
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    capsys.readouterr()
    assert program(bench.main, *arguments) == 2
    assert "out is there already; remove it or name another" in capsys.readouterr().err


@pytest.fixture
def family(tmp_path):
    """Two targets in folders of one name, and one of another vocabulary."""
    sizes = dict(hidden_size=16, intermediate_size=24, head_dim=4, max_position_embeddings=400)
    for seed, name, vocab_size in ((0, "a/final", 1024), (1, "b/final", 1024), (2, "other", 1200)):
        model = random_llama(seed, vocab_size=vocab_size, **sizes)
        save_model(model, tmp_path / name, WEIGHTS / "mini-7b", torch.float32)
    return tmp_path


def test_what_cannot_be_measured_is_refused(family, capsys):
    common = ["--targets", f"{family}/a/final,{family}/other", *SMALL[2:]]
    draft = ["--draft", WEIGHTS / "mini-draft", "--temperature", "0"]
    for line, message in (
        (["--methods", "s2d", *draft], "draft and target must share a vocabulary"),
        (["--methods", "s2d-tree:exits=0:stop=2"], "stop: "),
        (["--temperature", "1,-1"], "temperature: expected a number"),
    ):
        assert program(bench.main, *common, *line) == 2
        assert message in capsys.readouterr().err
    change_json(family / "a/final/config.json", max_position_embeddings=3)
    assert program(bench.main, *common) == 2
    assert "no question fits the context" in capsys.readouterr().err


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
    assert check.verdict([(gap, error)])[1] and check.verdict([]) == ("identical", True)
    assert not check.verdict([(gap, error), difference([7], [least])])[1]
    # Above T = 0 the noise tells the two apart.
    assert not check.verdict([difference([7], [9], temperature=0.5)])[1]


@pytest.mark.parametrize("temperature", [0, 1])
def test_check_exits_with_1_for_a_bug(temperature, questions, monkeypatch, capsys):
    right = speed.run_ours

    def wrong(*arguments, **options):
        tokens, made = right(*arguments, **options)
        return tokens if made.options.method == "ar" else [*tokens[:2], 99], made

    monkeypatch.setattr(speed, "run_ours", wrong)
    arguments = [*SMALL, "--methods", "s2d", "s2d:rejection", "--questions", questions, "--check"]
    assert program(bench.main, *arguments, "--temperature", temperature) == 1
    lines = re.findall(r"^mini-7b T=\d (.*: 2 answers compared: .*)", capsys.readouterr().out, re.M)
    bug = "2 answers compared: BUG: 2 of 2 differ by more than rounding explains"
    compared = ["s2d", "s2d:rejection"] if temperature == 0 else ["s2d"]
    assert lines == [f"{method}: {bug}" for method in compared]


def test_each_program_has_options_of_its_own(capsys):
    assert program(bench.main, "-h") == 0
    programs = re.findall(r"^    (\w+(?: train)?)", capsys.readouterr().out, re.M)
    assert programs == ["speed", "hf", "pays", "papers"]
    refuses(bench.main, capsys, "unrecognized arguments: hf", "--limit", 1, "hf")
    refuses(bench.main, capsys, "unrecognized arguments: --limit", *HF, "--limit", 1)


def test_mistakes_are_one_line(capsys):
    lines = ["--methods", "s2d:decision=nowhere"]
    assert program(bench.main, *lines) == 2
    assert "no decision model at nowhere" in capsys.readouterr().err
    refuses(bench.main, capsys, "no model folder at TYPO", "--draft", "TYPO")
    refuses(bench.main, capsys, "--rounds: must be at least 1, got 0", "--rounds", "0")
    refuses(bench.main, capsys, "tests is there already", "--out", ROOT / "tests")


def test_each_model_is_loaded_once():
    """A draft for all methods; a target that drafts for itself is the target."""
    folder, draft = WEIGHTS / "mini-7b", WEIGHTS / "mini-draft"
    names = "ar", "sd:exits=2", "s2d:exits=1,4", f"sd:exits=3:draft={folder}"
    found = {name: methods.parse_method(name, draft) for name in names}
    alone, one, other, itself = speed.load_pairs(folder, found, SimpleNamespace(**HERE)).values()
    assert alone.draft is None and one.draft is other.draft
    assert itself.draft is itself.target is alone.target is one.target
