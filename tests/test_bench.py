"""The benchmark: what it asks, how it times, and that its tables say what the records say."""

import copy
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import partial
from itertools import count, product

import pytest
import torch
from helpers import ROOT, WEIGHTS, limit_to, program, raises_line, random_llama, refuses
from transformers import AutoTokenizer

from s2d import generate, load_model
from s2d.bench import __main__ as bench
from s2d.bench import agreement, batches, check, measure, methods, plot, specbench, speed, tables
from s2d.bench.check import Difference, first_difference, observe_pass, verdict
from s2d.bench.methods import parse_method, peers_of
from s2d.decode import Scorer, Stats
from s2d.extras import compiled, static
from s2d.generate import Generation, start
from s2d.model import whole_mask
from s2d.train import corpus
from s2d.tree import Dynamic, TreeAttention

DRAFT = WEIGHTS / "mini-draft"


def write_questions(path, *questions):
    lines = [json.dumps(question, ensure_ascii=False) + "\n" for question in questions]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path):
    """Arguments of a small run: mini-7b, ar and s2d, two questions, one of two turns."""
    one = {"question_id": 7, "category": "qa", "turns": ["What is the capital of Tadastan?"]}
    two = {"question_id": 9, "category": "coding", "turns": ["Give me 3 tips.", "And the first?"]}
    file = write_questions(tmp_path / "few.jsonl", one, two)
    arguments = "--targets 7b --methods ar s2d --temperature 0 --max-new-tokens 8 --rounds 1"
    return f"{arguments} --questions {file}".split()


def test_default_questions_are_held_out_and_in_spec_benchs_form():
    questions = specbench.corpus_questions("held-out", 3)
    groups = list(map(specbench.group_of, questions))
    assert groups == [group for group in corpus.GROUPS for _ in range(3)]
    assert [question["question_id"] for question in questions] == list(range(18))
    assert any(len(question["turns"]) > 1 for question in questions)
    for group, question in zip(groups, questions):
        made = corpus.conversations(2, "held-out", [group])
        made = next(each for each in made if each.turns[0][0] == question["turns"][0])
        assert [turn for turn, _ in made.turns] == question["turns"]
    seen = {question["turns"][0] for question in specbench.corpus_questions("train", 3)}
    assert not seen & {question["turns"][0] for question in questions}


def test_a_file_in_spec_benchs_form_is_read(tmp_path):
    two = {"question_id": 1, "category": "coding", "turns": ["a", "b"], "more": 0}
    # JSON leaves these characters as they are; they end no line of the file.
    unusual = {"question_id": 2, "category": "qa", "turns": ["one\u2028line\x85still"]}
    file = write_questions(tmp_path / "q.jsonl", two, unusual)
    read = specbench.read_questions(file, 9)
    assert list(map(specbench.group_of, read)) == ["mt_bench", "qa"]
    assert read[1] == unusual and "more" not in read[0]
    form, kinds = "not in Spec-Bench's question format", "category is a text, turns is a list of"
    for bad, message in (
        *[("no json", form), ('{"turns": ["a"]}', form), ("[1]", form)],
        (json.dumps(two | {"category": ["qa"]}), kinds),
        (json.dumps(two | {"turns": "abc"}), kinds),
        (json.dumps(two | {"turns": []}), "holds no question"),
    ):
        file.write_text(bad)
        raises_line(specbench.read_questions, ValueError, message, file, 9)


METHODS = {
    "ar": {},
    "sd:compile:exits=2:draft_length=8": {"exits": (2,), "draft_length": 8},
    "mcsd:tree=4,2,2,1:init=target": {"tree": (4, 2, 2, 1), "init": "target"},
    "s2d-tree:tree=4x8x24:stop=0.3": {"tree": Dynamic(4, 8, 24), "stop": 0.3},
    "s2d:thresholds=.9,.9,0": {"thresholds": (0.9, 0.9, 0.0)},
    "s2d:coupled:stop=0.3": {"stop": 0.3, "coupled": True},
    "s2d:coupled=1": "method 's2d:coupled=1': no option 'coupled'",
    "fast": "unknown method 'fast'",
    "s2d:speed=9": "method 's2d:speed=9': no option 'speed'",
    "s2d:draft_length=x": "invalid literal",
    "s2d-tree:tree=4x8": "a dynamic tree is three numbers",
}


@pytest.mark.parametrize("text", METHODS)
def test_methods_are_names_with_options(text):
    asked = text, None, DRAFT, WEIGHTS / "mini-7b"
    if isinstance(METHODS[text], str):
        raises_line(parse_method, ValueError, METHODS[text], *asked)
    else:
        expected = "compile" in text, {"method": text.split(":")[0], **METHODS[text]}
        assert parse_method(*asked) == expected


def test_turns_are_fed_in_order_with_the_answers_before_them(tokenizer):
    prompts = []

    def run(prompt, seed):
        prompts.append(prompt)
        assert seed == 9
        return tokenizer.encode(f"answer {len(prompts)}")[1:], 0.5, None

    question = {"turns": ["first", "second", "third " * 400], "question_id": 1, "category": "stem"}
    record = measure.answer(tokenizer, "vicuna", 512, run, question, 9)
    turns = (["first"], ["first", "answer 1", "second"])
    assert prompts == [tokenizer.encode_chat(messages) for messages in turns] == record["prompts"]
    assert record["turns"] == ["answer 1", "answer 2"]  # the third turn fills the context
    assert list(map(tokenizer.decode, record["tokens"])) == record["turns"]
    assert (record["wall_time"], record["generations"]) == ([0.5, 0.5], [None, None])
    assert (record["question_id"], record["group"]) == (1, "mt_bench")


def record(method, group, number, tokens, seconds, generation=None):
    record = {"method": method, "group": group, "round": number, "tokens": [[5] * tokens]}
    return record | {"wall_time": [seconds], "generations": [generation]}


def test_speedups_are_medians_of_ratios_within_a_round():
    """The machine is three times as slow in the second round: only absolute speeds would notice."""
    records = []
    for number, slow in ((1, 1.0), (2, 3.0), (3, 1.0)):
        for group, gain in (("qa", 2.0), ("rag", 1.0)):
            records.append(record("ar", group, number, 10, slow))
            records.append(record("s2d", group, number, 10, slow / gain))
    summary = tables.summarise(records)
    groups = {group: cell["speedup"] for group, cell in summary["s2d"]["groups"].items()}
    assert groups == pytest.approx({"qa": 2.0, "rag": 1.0, "overall": 4 / 3})
    assert summary["s2d"]["spread"] == "1.33-1.33"
    records.append(record("s2d", "qa", 3, 0, 1.0))  # one slow answer in the third round
    changed = tables.summarise(records)["s2d"]
    assert changed["speedup"] == pytest.approx(4 / 3) and changed["spread"].startswith("0.")
    assert all(cell["speedup"] == 1.0 for cell in summary["ar"]["groups"].values())


def test_tables():
    times = {"draft_seconds": 0.3, "target_seconds": 0.6, "seconds": 1.0}
    ours = Generation(None, None, None, True, {})
    ours.stats = Stats([4] * 5, Counter({12: 3, 6: 9}), 30, 12, 6, 3, **times)
    records = [record("ar", "qa", 1, 10, 0.5), record("s2d", "qa", 1, 20, 1.0, ours)]
    records += [record("ar", "qa", 2, 10, 1.0), record("s2d", "qa", 2, 20, 1.0, ours)]
    summary = tables.summarise(records)
    lines = tables.render(tables.target_table(summary), markdown=False).splitlines()
    expected = "s2d 1.50 / 4.00 1.50 / 4.00 1.00-2.00 20.0 6.0 67%/75% 6:75% 12:25% 30%/60%/10% yes"
    assert lines[2].split() == expected.split()
    final = tables.final_table({("a", 0.0): summary, ("a", 1.0): {"ar": summary["ar"]}})
    rows = ["| method | a T=0 | a T=1 | mean |", "| --- | --- | --- | --- |"]
    rows += ["| ar | 1.00 | 1.00 | 1.00 |", "| s2d | 1.50 / 4.00 |  | 1.50 |"]
    assert tables.render(final, markdown=True).splitlines() == rows


def svg_texts(file):
    return [each.text for each in ElementTree.parse(file).iter() if each.tag.endswith("}text")]


def test_the_plot_says_what_the_table_says(tmp_path):
    """A file replaces none but its own kind."""
    rows = {"ar": 1.0, "sd:exits=2": 1.25, "transformers assisted": 0.755}
    summaries = {("mini-7b", 0.0): {name: {"speedup": speed} for name, speed in rows.items()}}
    file = tmp_path / "speed.svg"
    plot.write_plot(file, summaries)
    summaries["other", 0.7] = {"ar": {"speedup": 1.0}, "s2d": {"speedup": 2.5}}
    assert not {"other, T = 0.7", "2.50"} & set(svg_texts(file))
    plot.write_plot(file, summaries)
    texts = svg_texts(file)
    assert {"mini-7b, T = 0", "other, T = 0.7", *rows, "s2d"} <= set(texts)
    values = sorted(text for text in texts if re.fullmatch(r"\d\.\d\d", text))
    assert values == ["0.76", "1.00", "1.00", "1.25", "2.50"]
    colors = re.findall(r"fill: ?(#\w+)", file.read_text())
    assert set(colors) == {plot.TEXT, plot.OURS, "#d98032"} and list(tmp_path.iterdir()) == [file]
    file.write_text("<svg/>")
    raises_line(plot.check_plot, ValueError, "no picture that was written here", file)


def test_a_package_that_is_not_installed_is_named_in_one_line(monkeypatch, capsys):
    for name in ("transformers", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    message = "the package transformers, which is not installed: pip install -r tests/requirements"
    for line in ("--hf --targets 7b --limit 1", "shapes --shapes tiny --device cpu --hf"):
        refuses(bench.main, capsys, message, *line.split())
    monkeypatch.setattr(speed, "load_model", None)  # for a plot nothing is even loaded
    [pinned] = re.findall("^matplotlib==.*", (ROOT / "tests/requirements.txt").read_text(), re.M)
    refuses(bench.main, capsys, f"pip install {pinned}", "--plot", "speed.svg")


def test_the_command_beside_transformers(capsys, tmp_path):
    arguments = "--targets 7b --limit 1 --rounds 1 --max-new-tokens 3 --hf --markdown --plot"
    assert bench.main([*arguments.split(), str(tmp_path / "speed.svg")]) == 0
    output, pictured = capsys.readouterr(), svg_texts(tmp_path / "speed.svg")
    numbers = r"( [\d.]+ / [\d.]+ \|){7} [\d.]+-[\d.]+( \| [\d.]+){2} \|.* yes \|"
    for temperature in "01":
        assert f"mini-7b, T = {temperature}: speedup over ar" in output.out
    for row in ("ar", "sd:exits=2", "sd:exits=3", "sd:exits=4", "mcsd", "s2d", "s2d-tree"):
        assert len(re.findall(rf"^\| {row} \|{numbers}$", output.out, re.M)) == 2
        last = rf"^\| {row} \| ([\d.]+) / [\d.]+ \| ([\d.]+) / [\d.]+ \| [\d.]+ \|$"
        assert {row, *re.search(last, output.out, re.M).groups()} <= set(pictured)
    for row in ("transformers", "transformers assisted", "transformers look-up"):
        assert re.search(rf"^\| {row} \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", output.out, re.M)
    assert "min left here" in output.err


def test_greedy_answers_are_the_same_whatever_the_method(mini, tokenizer):
    target, draft = mini("mini-7b"), mini("mini-draft")
    methods = {name: (False, {"method": name}) for name in ("ar", "s2d", "mcsd", "s2d-tree")}
    runs = measure.runners({False: (target, draft)}, methods, peers_of(target, draft), 0.0, 12)
    questions = specbench.corpus_questions("held-out", 1)[::2]
    ask = partial(measure.answer, tokenizer, "vicuna", 512)
    [records] = measure.measure(runs, questions, 1, "test", ask)
    assert len(records) == 7 * len(questions)
    for question in questions:
        own = [r for r in records if r["question_id"] == question["question_id"]]
        assert len({json.dumps(record["tokens"]) for record in own}) == 1
    for each in (each for r in records if r["method"] == "s2d" for each in r["generations"]):
        assert each.stats.draft_seconds + each.stats.target_seconds <= each.stats.seconds


def test_no_method_always_follows_the_same_one():
    order, methods = [], "abcdef"
    ask = lambda name, question, seed: order.append(name) or {"asked": question}  # noqa: E731
    rounds = list(measure.measure(dict(zip(methods, methods)), range(12), 2, "test", ask))
    for number, records in enumerate(rounds, 1):
        asked = [(each["round"], each["asked"], each["method"]) for each in records]
        assert asked == list(product([number], range(12), methods))
    before = {(a, b) for a, b in zip(order, order[1:]) if a != b}
    assert len(rounds) == 2
    assert all(len({a for a, b in before if b == name}) >= 4 for name in methods)


def test_compiled_methods_stand_beside_the_others(small, monkeypatch, capsys):
    """What is compiled here is the block as it is: test_static compiles it really."""
    monkeypatch.setattr(static, "ROWS", (1,))
    monkeypatch.setattr(compiled, "compiled", lambda function, *rest: function)
    for memo in ("compiled_block", "compiled_head"):
        monkeypatch.setattr(static, memo, getattr(compiled, memo).__wrapped__)
    assert bench.main([*small, "--compile", "--check"]) == 0
    output = capsys.readouterr().out
    names = ["ar", "ar:compile", "s2d", "s2d:compile"]
    assert re.findall(r"^(\S+) +[\d.]+ / ", output, re.M) == 2 * names  # in full, and in the last
    for method in names[1:]:
        assert re.search(rf"^mini-7b {method}: identical; logits", output, re.M)


def test_agreement_is_what_a_plain_count_says(mini, held_out_prompts):
    """Beside logits over the whole vocabulary, token by token; without and with a vocabulary."""
    target, draft = mini("mini-7b"), load_model(DRAFT, dtype="float64")
    prompt = held_out_prompts(1)[0]
    answer = generate(target, prompt, method="ar", max_new_tokens=12).tokens
    for kept in (torch.arange(1024), torch.tensor(sorted(set(answer[::2])))):
        limit_to(draft, kept)
        ids = torch.tensor(prompt + answer)
        right = agreement.exits_right(draft, (2, 3, 4), ids[:-1], ids[1:])[:, len(prompt) - 1 :]
        for row, exit_layer in zip(right.tolist(), (2, 3, 4)):
            for number, token in enumerate(answer):
                tokens = torch.tensor([prompt + answer[:number]])
                hidden = draft.run_layers(draft.embed(tokens), end=exit_layer)
                likeliest = kept[draft.logits(hidden[0, -1])[kept].argmax()].item()
                assert row[number] == (likeliest == token)


def test_exit_0_agrees_as_a_plain_count_says():
    """The likeliest token by counts of all that came before, and confidence in its bin."""
    found = agreement.table_right(None, [1, 2, 3, 1], [2, 3, 9, 1, 2])
    assert [right for _, right in found] == [True, True, False, False, True]
    assert found[3][0] == 0.0  # nothing has followed 9
    lines = agreement.calibration([(0.1, False), (1.0, True), (0.15, True)])
    assert lines[1:] == [["0.0-0.2", "67%", "12%", "50%"], ["0.8-1.0", "33%", "100%", "100%"]]


def test_targets_of_the_same_name_are_kept_apart(small, tmp_path, capsys):
    folders = [tmp_path / each / "model" for each in "ab"]
    for folder in folders:
        shutil.copytree(WEIGHTS / "mini-7b", folder)
    assert bench.main([*small, "--targets", ",".join(map(str, folders))]) == 0
    table = capsys.readouterr().out
    assert all(f"{folder} T=0" in table for folder in folders)


def test_answer_files_say_what_spec_bench_reads(small, tmp_path, capsys):
    """Lists by turn, an accept length a step, and texts that its tokenizer counts alike."""
    small += ["--out", str(tmp_path / "out")]
    assert bench.main([*small, "--rounds", "2"]) == 0
    count = AutoTokenizer.from_pretrained(WEIGHTS / "mini-7b")
    for name in ("mini-7b-T0-ar", "mini-7b-T0-s2d"):
        file = tmp_path / "out" / f"{name}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        asked = [(line["question_id"], line["category"]) for line in lines]
        assert asked == [(7, "qa"), (9, "coding")]
        assert [len(line["choices"][0]["turns"]) for line in lines] == [1, 2]
        for [choice] in (line["choices"] for line in lines):
            by_turn = ("turns", "new_tokens", "wall_time", "decoding_steps")
            assert len({len(choice[key]) for key in by_turn}) == 1 and min(choice["wall_time"]) > 0
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) > 0
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            for text, tokens in zip(choice["turns"], choice["new_tokens"]):
                counted = len(count(text).input_ids) - 1
                assert abs(counted - tokens) <= 2  # EOS, and where a text was cut
    specbench.check_answers(tmp_path / "out", ["mini-7b-T0"])  # a next run replaces them
    file.write_bytes(changed := file.read_bytes() + b"mine\n")
    capsys.readouterr()
    refuses(bench.main, capsys, "s2d.jsonl is in the way, and no answer file", *small)
    assert file.read_bytes() == changed


def test_ties_are_told_from_bugs():
    """By the gap in float64, and by how far the target's own pass is off at the two tokens."""
    target = random_llama(0)
    with torch.no_grad():  # two likely tokens that can never be told apart
        target.lm_head.weight[[7, 9]] = 1.5 * target.lm_head.weight[9]
    logits = lambda tokens: target(torch.tensor([tokens]))[0, -1]  # noqa: E731
    single, draft = copy.deepcopy(target).float(), random_llama(1).float()
    models = single, single, draft, dict(method="mcsd")
    passes = [observe_pass(*models, number, [5, number]) for number in range(4)]
    prompt = next(p for p in product(range(61), repeat=2) if logits(p).argmax() in (7, 9))

    def difference(*answers, **options):
        made = {
            "prompts": [[*prompt]],
            "generations": [start(single, [*prompt], None, "ar", **options)],
        }
        return first_difference(single, *(made | {"tokens": [each]} for each in answers))

    tie = difference([7, 5], [9, 5])
    assert (tie.tokens, tie.a, tie.b) == (list(prompt), 7, 9)
    assert difference([7, 5], [7, 5]) is None
    unlikely = difference([7], [logits(prompt).argmin().item()])
    bug = "BUG: .* 2 different answers, 1 by more than rounding explains"
    for differences, line, expected in (
        ([], "identical; logits ", True),
        ([tie, tie], "2 ties by rounding, largest gap 0.0e[+]00; logits ", True),
        ([tie, unlikely], bug, False),
        ([difference([7, 5], [7])], "BUG: an answer ends where", False),
        # Above T = 0 the race tells these two apart.
        ([difference([7], [9], temperature=0.5)], "BUG: .* 1 by more than rounding", False),
    ):
        text, good = verdict(target, passes, differences)
        assert re.match(line, text) and good is expected
    # The same gap with noise at the two tokens, at others only, and none: tie, in doubt, bug.
    exact = logits(prompt)[[7, 8]]
    gap = exact.diff().abs().item()
    off = [{"plain": p.plain + 0.6 * gap, "checked": p.checked + 0.6 * gap} for p in passes]
    noisy = [each._replace(**changes) for each, changes in zip(passes, off)]
    for noise, own, expected in ((0.4, passes, False), (0.6, passes, True), (0.0, noisy, None)):
        found = Difference(list(prompt), 7, 8, exact + noise * gap, torch.zeros(2))
        assert verdict(target, own, [found])[1] is expected
        even = found._replace(race=exact.flip(0))  # the race makes up for the gap
        assert verdict(target, passes, [even])[1] is True


def plant(bug, positions, mask, tree, n):
    """A mistake in what a target pass is given: a token hidden, siblings seen, positions off."""
    first, parents = len(positions) - len(tree), tree.parents.tolist()
    if bug == "hidden token":
        mask[:, 50] = -torch.inf
    if bug == "node sees sibling":
        for node, sibling in product(range(len(tree)), repeat=2):
            if sibling < node and parents[node] == parents[sibling]:
                mask[first + node, n + sibling] = 0
    if bug == "position off by one":
        positions[first:] += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planted_bugs_are_found_in_the_passes(dtype, mini, held_out_prompts, monkeypatch):
    """Each is called a bug, or in doubt; the right passes are as good as plain ones."""
    monkeypatch.setattr(check, "NEW_TOKENS", 6)
    target, draft = (load_model(WEIGHTS / name, dtype=dtype) for name in ("mini-7b", "mini-draft"))
    prompts = held_out_prompts(1)
    wanted = Scorer.wanted

    def judged(bug):
        def wrongly_wanted(self, context, tree):
            def wrong_span(n, start, end):
                positions, mask = TreeAttention.span(self.attention, n, start, end)
                if bug and start and len(tree):
                    mask, positions = whole_mask(mask, 0, end, mask).clone(), positions.clone()
                    plant(bug, positions, mask, tree, n)
                return positions, mask

            self.attention.span = wrong_span
            return wanted(self, context, tree)

        models = target, target, draft, dict(method="mcsd")
        with monkeypatch.context() as patch:
            patch.setattr(Scorer, "wanted", wrongly_wanted)
            passes = [observe_pass(*models, 1, prompt) for prompt in prompts]
        return verdict(mini("mini-7b"), passes, [])[1]

    assert judged(None) is True
    assert judged("hidden token") is not True and judged("node sees sibling") is not True
    assert judged("position off by one") is False


SAMPLED = "--temperature 1 --methods s2d:coupled s2d s2d-tree"


def test_check_compares_sampled_texts_too_where_they_must_be_equal(small, capsys):
    assert bench.main([*small, "--check", "--rounds", "2", *SAMPLED.split()]) == 0
    checked = re.findall(r"^mini-7b (\S+): (\w+)", capsys.readouterr().out, re.M)
    assert checked == [("s2d:coupled", "identical"), ("s2d-tree", "identical")]


@pytest.mark.parametrize(("more", "name"), [("", "s2d"), (SAMPLED, "s2d:coupled")])
def test_check_exits_with_1_for_a_bug(more, name, small, monkeypatch, capsys):
    def wrong(*arguments, method, **options):
        output = generate(*arguments, method=method, **options)
        output.tokens[3:] = [99] * (method == "s2d") + output.tokens[3:-1]
        return output

    monkeypatch.setattr(measure, "generate", wrong)
    assert bench.main([*small, "--check", *more.split()]) == 1
    bug = f"mini-7b {name}: BUG: .* 2 different answers, 2 by more than rounding explains"
    assert re.search(bug, capsys.readouterr().out)


def test_interrupted_it_shows_the_rounds_that_were_finished(small, monkeypatch, capsys):
    calls = count(1)

    def soon(*arguments, **options):
        if next(calls) == 12:  # the second round
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(measure, "generate", soon)
    assert bench.main([*small, "--rounds", "50"]) == 130
    output = capsys.readouterr()
    assert "interrupted" in output.err and re.search(r"^s2d +[\d.]+", output.out, re.M)


def test_sweep_tries_settings_on_training_prompts_best_first(monkeypatch, capsys):
    asked, choose = [], speed.choose_questions
    first_two = lambda *how: asked.append(how[1]) or choose(*how)[:2]  # noqa: E731
    monkeypatch.setattr(speed, "choose_questions", first_two)
    arguments = "sweep --targets 7b --limit 1 --rounds 1 --temperature 0 --max-new-tokens 16"
    arguments += " --methods s2d:draft_length=1 s2d:draft_length=6"
    assert bench.main(arguments.split()) == 0
    row = r"^(ar|s2d:\S+) .* ([\d.]+) / [\d.]+ +[\d.]+-[\d.]+ "
    rows = re.findall(row, capsys.readouterr().out, re.M)
    speeds = [float(found) for _, found in rows]
    assert len(rows) == 3 and speeds == sorted(speeds, reverse=True) and asked == ["train"]


MISTAKES = {
    "--targets nowhere": "no model folder at nowhere",
    "--methods quick": "unknown method 'quick'",
    "--methods s2d:stop=nowhere": "no decision model at nowhere",
    "--questions nowhere.jsonl": "nowhere.jsonl",
    "--draft nowhere": "no model folder at nowhere",
    "--temperature warm": "invalid comma-separated float value: 'warm'",
    "--rounds 0": "--rounds: must be at least 1, got 0",
    "--questions {tmp}/long.jsonl": "no question fits the context of a target",
    "agreement --target nowhere": "no model folder at nowhere",
    "shapes --device cuda": "torch sees no GPU here; use --device cpu",
    "shapes --context 4033": "--context is at most 4032",
    "--plot speed.png": "speed.png has to end in .svg",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    long = {"question_id": 1, "category": "qa", "turns": ["word " * 600]}
    write_questions(tmp_path / "long.jsonl", long)
    assert program(bench.main, *arguments.format(tmp=tmp_path).split()) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "min left here" not in line]
    assert len(errors) == 1 and MISTAKES[arguments] in errors[0]


def test_throughput_by_batch(tmp_path, capsys):
    """Of the same prompts one by one and together: the same count of tokens, in a table."""
    line = "batches --target 7b --limit 1 --rounds 1 --max-new-tokens 6 --batches 1,3 --hf"
    assert bench.main([*line.split(), "--plot", str(tmp_path / "lines.svg")]) == 0
    rows = [re.split("  +", row) for row in capsys.readouterr().out.splitlines() if "  " in row]
    assert [row[0] for row in rows] == ["batch", "ar", "s2d-tree:exits=0", "s2d", "transformers"]
    assert rows[0][1:] == ["1", "3"] and rows[1][1] == "1.00"
    assert (tmp_path / "lines.svg").read_text().count("transformers") == 1
    target, draft = load_model(WEIGHTS / "mini-7b"), load_model(DRAFT)
    prompts, peer = [[5, 6, 7], [8, 9], [10]], methods.peer_of(target)
    alone = batches.ours(target, draft, prompts, 5, {"method": "ar"}, 1)
    assert alone == batches.ours(target, draft, prompts, 5, {"method": "s2d"}, 3)
    assert alone == batches.padded(peer, prompts, 5, target.config.eos_token_ids, 2)
