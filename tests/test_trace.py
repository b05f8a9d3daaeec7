"""A page shows what happened, and nothing else: records against Steps, pages in a real browser."""

import copy
import functools
import itertools
import json
import os
import re
from dataclasses import replace
from operator import mul
from unittest.mock import Mock

import pytest
import torch
from browser import Browser
from helpers import ROOT, limit_to, path_of, raises_line, random_llama, refuses
from helpers import program as program_of

import run
from s2d.draft import SortedDraft
from s2d.generate import Options, start
from s2d.proposal import TARGET
from s2d.sampling import Sampler
from s2d.trace import Recorder, check_page, page, traced
from s2d.trace.page import write_page
from s2d.trace.record import target_alone
from s2d.tree import ancestor_mask

QUESTION = "Tell me a story about a robot called Nora and a clever old fisherman."
NAMES = {"target": "T", "draft": "D"}
METHODS = {name: {} for name in ("ar", "s2d", "s2d-tree")} | {
    "sd": {"exits": [3]},
    "mcsd": {"tree": (3, 2, 1)},
    "table": {"method": "s2d", "exits": [0, 3, 4]},
    "table alone": {"method": "s2d-tree", "exits": [0]},
    "roots": {"method": "mcsd", "init": "target", "tree": (3, 2)},
    "replacement": {"method": "mcsd", "replacement": True, "tree": (4, 2)},
    "coupled roots": {"method": "mcsd", "init": "target", "tree": (3, 2), "coupled": True},
}
program = functools.partial(program_of, run.main, "--target", "7b", "--prompt", QUESTION)
close = functools.partial(pytest.approx, rel=1e-3, abs=1e-12)


@pytest.fixture(scope="module")
def browser():
    driven = Browser()
    yield driven
    driven.close()


def options_of(name, draft, **more):
    options = {"method": name, **METHODS[name], **more}
    return options | {"draft": None if options["method"] == "ar" else draft}


def recorded(target, tokenizer, prompt, options, file=None):
    """(what was recorded, the Steps themselves, the Generation)"""
    generation, steps = start(target, prompt, **options), []
    recorder = Recorder(tokenizer, prompt, NAMES, generation.plan)
    for step in generation:
        steps.append(step)
        recorder.add(step)
    alone = target_alone(generation.plan.options)
    recorder.time_alone(lambda options: start(target, prompt, **vars(options)), alone)
    if file:
        write_page(recorder.data(), file)
    return json.loads(json.dumps(recorder.data())), steps, generation


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return tokenizer.encode_chat([QUESTION])


@pytest.fixture(scope="module")
def known(mini, tokenizer, prompt, tmp_path_factory):
    """known(method, temperature) -> (page, record, Steps, Generation), of an answer."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def make(name, temperature):
        more = {"temperature": temperature, "max_new_tokens": 40, "seed": 3}
        options = options_of(name, mini("mini-draft"), **more)
        file = folder / f"{name}-{temperature:g}.html"
        return file, *recorded(mini("mini-7b"), tokenizer, prompt, options, file)

    return make


def rejections(position, p, q, tree, replacement):
    """Compare the tests of a position with rows (V,) of p and q: how many reject."""
    rejected = 0
    for test in position["tests"]:
        token = tree.tokens[test["node"]].item()
        numbers = [p[token].item(), q[token].item(), min(1.0, (p[token] / q[token]).item())]
        assert [test[name] for name in ("p", "q", "acceptance")] == close(numbers)
        if abs(test["draw"] - numbers[-1]) > 1e-3:  # both are recorded with four digits
            assert test["accepted"] == (test["draw"] < numbers[-1])
        if not test["accepted"]:
            rejected += 1
            left = (p - q).relu()
            p = left / left.sum()
            if not replacement:
                q = q * (torch.arange(len(q)) != token)
                q = q / q.sum().clamp(min=1e-300)
            for row, shown in zip((p, q), position["stages"][rejected].values()):
                assert shown == close(row[position["ids"]].tolist())
    return rejected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_a_record_is_what_happened(name, temperature, known, prompt, tokenizer):
    """Every number again, from the Step itself."""
    _, data, steps, generation = known(name, temperature)
    about, rejected, drafted, races = data["about"], 0, 0, 0
    assert "".join(data["answer"]) == tokenizer.decode(generation.tokens)
    assert len(data["answer"]) == len(generation.tokens)
    for shown, step in zip(data["steps"], steps, strict=True):
        proposal, tree, path = step.proposal, step.proposal.tree, step.verdict.path
        tokens, parents, nodes = tree.tokens.tolist(), tree.parents.tolist(), shown["nodes"]
        exits, positions = nodes["exits"], shown["positions"]
        assert (shown["n"], shown["path"], shown["tokens"]) == (step.n, path, step.tokens)
        assert (nodes["tokens"], nodes["parents"], exits) == (tokens, parents, proposal.exits)
        for exit_layer, number in zip(exits, nodes["rounds"], strict=True):
            *below, last = [[TARGET, 1.0]] if number == TARGET else shown["rounds"][number]
            assert last[0] == exit_layer
            for lower, confidence in below:
                assert confidence <= about["thresholds"][about["exits"].index(lower)]
        context = (prompt + generation.tokens)[: step.n]
        for node, suffix in enumerate(nodes["suffixes"]):
            assert not suffix or exits[node] == 0  # a node that fills a tree has none
            before = context + [tokens[each] for each in path_of(parents, parents[node])]
            for length in range(1, 5):  # the token followed this suffix, and none that is longer
                asked = [*before[len(before) - length :], tokens[node]]
                followed = asked in [context[i : i + length + 1] for i in range(step.n - length)]
                assert followed == (length <= len(suffix)) or exits[node] != 0
        sources = [*(exits[node] for node in path), TARGET][: len(step.tokens)]
        assert sources == step.sources == shown["sources"]
        drafted += len(sources) - sources.count(TARGET)
        p = torch.softmax(step.logits / (temperature or 1.0), dim=-1)
        above = [parent + 1 for parent in parents]
        assert nodes["p"] == close(p[above, tokens].tolist())
        walk = zip(positions, [-1, *path], [*path, None], strict=True)
        for number, (position, node, accepted) in enumerate(walk, step.n):
            row, tests, ids = p[node + 1], position["tests"], position["ids"]
            assert position["accepted"] == accepted and row.argmax() in ids
            assert position["stages"][0]["p"] == close(row[ids].tolist())
            free = accepted is None or name == "roots" and node == -1  # roots face no test
            assert [each["node"] for each in tests if each["accepted"]] == [accepted] * (not free)
            assert ("numbers" in position) == (temperature > 0 and proposal.q is None)
            if "numbers" in position:
                numbers = Sampler(3, "cpu").numbers_at(number, len(row))
                assert position["numbers"] == close(numbers[ids].tolist())
                chosen = [tokens[accepted]] if accepted is not None else step.tokens[len(path) :]
                assert (row / numbers).argmax() in chosen or not chosen
                races += 1
            if tests and "draw" in tests[0]:
                q = proposal.q[node + 1]
                rejected += rejections(position, row, q, tree, name == "replacement")
        tests = [test for position in positions for test in position["tests"]]
        draws = [test["draw"] for test in tests if "draw" in test]
        assert draws == close([draw.item() for draw in step.verdict.draws])
        bonus = [each["bonus"] for each in positions if each["bonus"] is not None]
        assert bonus == step.tokens[len(path) :]
        counts = {"filled": step.n + len(tree), "kept": step.n + len(path)}
        assert shown["caches"][0] == {"name": "target"} | counts
        for cache in shown["caches"]:
            assert step.n <= cache["kept"] <= cache["filled"] or cache["filled"] <= step.n
        *parts, all_of_it = step.draft_seconds, step.target_seconds, step.seconds
        seconds = [*parts, all_of_it - sum(parts)]
        assert shown["ms"] == pytest.approx([1000 * each for each in seconds], rel=1e-2)
    assert drafted == generation.stats.accepted
    assert races >= len(steps) or not (temperature and generation.plan.coupled)
    assert rejected or not temperature or name == "roots" or generation.plan.coupled


def test_caches_hold_what_the_record_says(known, monkeypatch):
    """Their real lengths, before and after every step."""
    lengths, keep = [], SortedDraft.keep

    def watched(self, *what):
        before = [each.filled for each in self.exits]
        keep(self, *what)
        lengths.append((before, [each.filled for each in self.exits]))

    monkeypatch.setattr(SortedDraft, "keep", watched)
    _, data, *_ = known.__wrapped__("s2d-tree", 0.0)  # anew, and not from before
    caches = [step["caches"][1:] for step in data["steps"]]
    shown = [tuple([cache[key] for cache in each] for key in ("filled", "kept")) for each in caches]
    assert shown == lengths and len({tuple(before) for before, _ in lengths}) > 3


def test_why_drafting_stopped(mini, tokenizer, prompt):
    never = Mock(side_effect=lambda prediction: torch.zeros(len(prediction.probs)), threshold=0.5)
    table = {"method": "s2d", "exits": [0], "stop": 0.2, "draft_length": 3}
    for options, reasons in (
        ({"method": "sd", "draft_length": 3, "stop": 0.0}, {"length", "context"}),
        ({"method": "sd", "stop": 1.0}, {"confidence", "context"}),
        ({"method": "sd", "stop": never}, {"policy", "context"}),
        ({"method": "s2d", "stop": 0.5, "draft_length": 3}, {"confidence", "length", "context"}),
        (table, {"confidence", "context"}),
    ):
        options |= {"draft": mini("mini-draft"), "max_new_tokens": 30}
        data, *_ = recorded(mini("mini-7b"), tokenizer, prompt, options)
        assert {step["stopped"] for step in data["steps"]} == reasons
        assert data["steps"][-1]["stopped"] == "context"
        for step in data["steps"]:
            if step["stopped"] == "confidence":
                sure = (tried[-1][1] for tried in step["rounds"])
                *before, last = itertools.accumulate(sure, mul)
                assert last < options["stop"] + 0.01
                not_sent = options.get("exits") == [0]  # a table's token, which cost no pass
                assert len(step["rounds"]) == len(step["nodes"]["tokens"]) + not_sent
                assert all(path > options["stop"] - 0.01 for path in before)
            if step["stopped"] == "length":
                assert len(step["rounds"]) == options["draft_length"]


class Hostile:
    """A tokenizer whose every token is something to be careful with."""

    SCRIPT = "</script><script>window.hacked = 1</script>"
    IMAGE = "<img src=x onerror='window.hacked = 1'>"
    TEXTS = (SCRIPT, IMAGE, "\"'`&amp;", "שלום", "👩‍🔬", "\n", "\u2028", "${1}", "")

    def decode(self, ids):
        return "".join(self.TEXTS[token % len(self.TEXTS)] for token in ids)

    def encode(self, text):
        return [8]


@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 0.7) for name in METHODS), ("s2d", 0.0), ("mcsd", 0.0)]
)
def test_texts_are_shown_and_run_nothing(name, temperature, browser, tmp_path):
    """Those of models in bfloat16, the draft with a vocabulary of its own."""
    exits = {"exit_layers": (1, 2, 4), "thresholds": (0.4, 0.6, 0.0), "eos_token_ids": (5,)}
    target, draft = random_llama(0, **exits).bfloat16(), random_llama(1, **exits).bfloat16()
    limit_to(draft, torch.arange(3, 40))
    more = {"temperature": temperature, "max_new_tokens": 30, "top_k": 50, "top_p": 0.9}
    options, file = options_of(name, draft, **more), tmp_path / "page.html"
    data, _, generation = recorded(target, Hostile(), [0, 1, 2, 3, 4, 5], options, file)
    assert sum((step["tokens"] for step in data["steps"]), []) == generation.tokens
    assert len(set(data["pieces"].values())) > 5
    browser.open(file)
    browser.script("all('#answer span').forEach((each) => each.click())")
    assert browser.text("#answer") == Hostile().decode(generation.tokens)
    assert f"temperature {temperature:g}, top-k 50, top-p 0.9 · seed 0" in browser.text("#about")
    assert browser.text("#prompt") == Hostile().decode(range(6))
    found = "return [typeof window.hacked, document.images.length, document.scripts.length]"
    assert browser.script(found) == ["undefined", 0, 2]
    assert browser.complaints() == []


ALL_STEPS = """
const texts = (selector) => all(selector).map((each) => each.textContent);
const columns = (row) => all(".cell", row).map((each) => +each.style.getPropertyValue("--column"));
const widths = (row) => all("i", row).map((bar) => parseFloat(bar.style.width));
return Array.from({ length: arguments[0] }, (_, step) => {
  if (step) document.getElementById("next").click();
  return {
    number: texts("#step-number")[0],
    stopped: texts("#node")[0],
    accepted: all("#tree g").map((each) => each.classList.contains("accepted")),
    mask: all("#mask .row").map(columns),
    positions: all("#positions button").map((button) => {
      button.focus();
      return [texts("#tests > p").join(" "), all("#tests tr").slice(1).map(widths)];
    }),
    caches: texts("#caches > div"),
  };
});
"""


SHOWN = {"s2d": 0.0, "mcsd": 1.0, "s2d-tree": 1.0, "ar": 0.0, "roots": 1.0, "table": 1.0}
SHOWN |= {"table alone": 0.0, "coupled roots": 1.0}


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_record(name, known, browser, tokenizer):
    """Tokens, tree, mask rows, tests and caches of every step, as the browser has them."""
    file, data, steps, generation = known(name, SHOWN[name])
    browser.open(file)
    assert browser.text("#answer") == tokenizer.decode(generation.tokens)
    first_class = "return all('#answer span').map((each) => each.className.split(' ')[0])"
    kinds = [TARGET, *data["about"]["exits"]]
    sources = [source for step in data["steps"] for source in step["sources"]]
    assert browser.script(first_class) == [f"source{kinds.index(source)}" for source in sources]
    names = {TARGET: "the target", 0: "the table"}
    names |= {kind: f"the draft, after layer {kind}" for kind in kinds if kind > 0}
    counts = [(names[kind], sources.count(kind)) for kind in kinds if kind in sources]
    assert browser.texts("#legend span") == [f"{name}: {count}" for name, count in counts]
    on_page = browser.script(ALL_STEPS, len(steps))
    for number, (seen, shown, step) in enumerate(zip(on_page, data["steps"], steps, strict=True)):
        tree, path = step.proposal.tree, step.verdict.path
        assert seen["number"] == f"{number + 1} of {len(steps)}" and seen["stopped"]
        assert seen["accepted"] == [node in path for node in range(len(tree))]
        mask = ancestor_mask(tree.parents)
        assert seen["mask"] == [row.nonzero().flatten().tolist() for row in mask]
        for (words, widths), position in zip(seen["positions"], shown["positions"], strict=True):
            accepted = sum(test["accepted"] for test in position["tests"])
            assert words.count(": accepted") == accepted
            assert words.count(": rejected") == len(position["tests"]) - accepted
            assert ("bonus" in words) == (position["bonus"] is not None)
            columns = [stage[key] or [] for stage in position["stages"] for key in ("p", "q")]
            if "numbers" in position:
                race = [p / e for p, e in zip(columns[0], position["numbers"])]
                columns.append([each / max(race) for each in race])
                winner = max(zip(race, position["ids"]))
                if position["accepted"] is not None or position["bonus"] is not None:
                    assert f"p/e = {winner[0]:.3f}" in words
            rows = zip(*filter(None, columns), strict=True)
            wide = [pytest.approx([100 * each for each in row], abs=0.006) for row in rows]
            assert widths == wide
        for said, cache in zip(seen["caches"], shown["caches"], strict=True):
            name, filled, kept = cache.values()
            assert said == f"{name}: filled {filled}, kept {kept}, rolled back {filled - kept}"
    assert browser.complaints() == []


def test_every_control_works_by_mouse_and_keyboard(known, browser):
    file, data, steps, generation = known("mcsd", 1.0)
    browser.open(file)
    end, last = f"{len(steps)} of", len(generation.tokens) - 1
    for action, *how, part, wanted in (
        (browser.click, "#next", "#step-number", "2 of"),
        (browser.click, "#next", "#step-number", "3 of"),
        (browser.click, "#previous", "#step-number", "2 of"),
        (browser.script, "document.activeElement.blur()", "#step-number", "2 of"),
        (browser.press, "Right", "Right", "Left", "#step-number", "3 of"),
        (browser.keys, "#slider", "End", "#step-number", end),
        (browser.keys, "#slider", "Home", "Right", "#step-number", "2 of"),
        # The answer: one stop for Tab, arrow keys within; focus shows, Enter goes to the step.
        (browser.keys, "#answer span", "End", "#step-number", "2 of"),
        (browser.press, "Left", "Right", "#token", f"token {last + 1} of"),
        (browser.press, "Enter", "#step-number", end),
        (browser.press, "Home", "#token", "token 1 of"),
        (browser.hover, "#answer span", 4, "#token", "token 5 of"),
        (browser.click, "#next", "#step-number", end),
        (browser.click, "#answer span", last, "#step-number", end),
        # An address names a step.
        (browser.script, "location.hash = '#step-2'", "#step-number", "2 of"),
    ):
        action(*how)
        assert wanted in browser.text(part), how
    assert browser.script("return all('#answer span[tabindex=\"0\"]').length") == 1
    assert "times as fast as the target alone" in browser.text("#time")
    # Tree and mask light up together.
    number = next(i for i, each in enumerate(data["steps"], 1) if len(each["positions"]) > 2)
    browser.script(f"location.hash = '#step-{number}'")
    parents = data["steps"][number - 1]["nodes"]["parents"]
    deepest = len(parents) - 1
    above = path_of(parents, deepest)
    lit = """const lit = (each, i) => each.classList.contains("lit") ? [i] : [];
        return ["#tree g", "#mask .column", "#mask .row"].map((part) => all(part).flatMap(lit))"""
    ways = (browser.hover, deepest), (browser.keys, "End")
    for part, (action, how) in itertools.product(("#tree g", "#mask .row"), ways):
        browser.hover("h1")
        browser.script("all('.lit').forEach((each) => each.classList.remove('lit'))")
        action(part, how)
        assert browser.script(lit) == [above, above, [deepest]], part
        assert f"Node {deepest}" in browser.text("#node")
    # Positions.
    button, tests = "#positions button", []
    ways = (browser.hover, button, 1), (browser.focus, button), (browser.press, "Right")
    for action, *how in (*ways, (browser.click, button, 0)):
        action(*how)
        tests.append(browser.text("#tests"))
    assert tests[0] == tests[2] != tests[1] == tests[3]
    # The code.
    link, names = "a[href^='#code-']", set()
    for number, text in enumerate(browser.texts(link)):
        browser.click(link, number)
        path, name = text.split(": ")
        assert browser.script(f"return document.getElementById('code-{name}').open")
        source = browser.text(f"[id='code-{name}'] pre")
        assert f"def {name.split('.')[-1]}(" in source and source in (ROOT / path).read_text()
        names.add(name)
    assert {"verify_sampled", "residual", "ancestor_mask", "KVCache.keep", "decode_step"} <= names
    assert browser.complaints() == []


def luminance(color):
    parts = [each / 255 for each in color]
    parts = [each / 12.92 if each <= 0.04 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(map(mul, (0.2126, 0.7152, 0.0722), parts))


def test_it_is_readable_in_light_and_dark(known, browser):
    """Text and its background differ by 4.5 to 1 at least (WCAG 2.2, 1.4.3), in every colour."""
    browser.open(known("s2d", 1.0)[0])
    papers = set()
    for dark in (True, False):
        browser.dark(dark)
        paper, *inks = browser.script("""
            const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const texts = all('#answer span:not(.lit), .why, h2, #legend span');
            const colors = new Set(texts.map((each) => getComputedStyle(each).color));
            return [getComputedStyle(document.body).backgroundColor, ...colors].map(parts)""")
        papers.add(tuple(paper))
        for ink in inks:
            low, high = sorted((luminance(ink), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) > 4.5, (dark, ink)
        assert len(inks) >= 3
    assert len(papers) == 2


@pytest.mark.parametrize("method", ["mcsd", "s2d-tree"])
def test_a_page_is_small_and_needs_no_network(method, mini, tokenizer, prompt, tmp_path):
    """The largest pages: 128 tokens, with p and q."""
    options = {"method": method, "draft": mini("mini-draft"), "temperature": 1.0}
    target, file = copy.copy(mini("mini-7b")), tmp_path / "page.html"
    target.config = replace(target.config, eos_token_ids=())
    *_, generation = recorded(target, tokenizer, prompt, options, file)
    text = file.read_text()
    assert len(text.encode()) < 300_000 and len(generation.tokens) == 128
    style, script = re.findall(r"<(?:style|script)>(.*?)</", text, re.DOTALL)
    assert "default-src 'none'" in text and not re.search(r"url\(|@import", style)
    assert not re.search(r"fetch|import\(|XMLHttp|innerHTML|eval", script)
    assert re.findall(r"https?://[^\"'\s]*", script) == ["http://www.w3.org/2000/svg"]


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.html").write_text("<!doctype html>\n<p>mine")
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "nowhere")
    (tmp_path / "ours.html").write_text(page.BEGINNING)
    (tmp_path / "other.html").symlink_to(tmp_path / "ours.html")
    os.mkfifo(tmp_path / "pipe.html")  # is not read from: that would wait for ever
    monkeypatch.setattr(run, "load_model", None)  # nothing is even loaded
    names = (
        "mine.html folder.html link.html other.html pipe.html none/page.html mine.html/page.html"
    )
    for name in names.split():
        refuses(run.main, capsys, name, "--target", "7b", "--trace", tmp_path / name)
    assert (tmp_path / "mine.html").read_text().endswith("mine")
    assert len(list(tmp_path.iterdir())) == 6


def test_run_writes_a_page_and_the_same_answer(tmp_path, capsys):
    """With --trace the answer is the same; a page of ours is replaced by the next."""
    trace, answers = ("--trace", tmp_path / "page.html"), []
    for more in ((), trace, ("--json",), ("--json", *trace)):
        assert program("--max-new-tokens", 24, *more) == 0
        out, error = capsys.readouterr()
        answers.append(json.loads(out)["text"] if "--json" in more else out.partition("\n\n")[0])
        assert (f"every step: {tmp_path / 'page.html'}" in error) == (len(more) > 1)
    assert len(set(answers)) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    check_page(tmp_path / "page.html")


@pytest.mark.parametrize(("line", "count"), [("", 3), ("--method mcsd --init target", 1)])
def test_an_interrupted_answer_has_its_page(line, count, tmp_path, interrupt, capsys, browser):
    """Even one without a token: the first step with roots of the target emits none."""
    file = tmp_path / "page.html"
    interrupt(count + 1)  # which is shown, but not recorded
    assert program("--trace", file, *line.split()) == 130
    browser.open(file)
    assert browser.complaints() == [] and browser.text("#step-number") == f"1 of {count}"
    answer = browser.text("#answer")
    assert capsys.readouterr().out.startswith(answer) and bool(answer) == (line == "")


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("failure", [FULL, KeyboardInterrupt()])
def test_an_answer_is_not_lost_with_its_page(failure, tmp_path, monkeypatch, capsys):
    """The disk is full at the end, or the timing of the target alone is interrupted."""
    file = tmp_path / "page.html"
    name = "write_page" if failure is FULL else "Recorder.time_alone"
    monkeypatch.setattr(f"s2d.trace.{name}", Mock(side_effect=failure))
    code = program("--max-new-tokens", 8, "--json", "--trace", file)
    out, error = capsys.readouterr()
    assert json.loads(out)["tokens"] and file.is_file() == (failure is not FULL)
    full = 2, f"run.py: {file} could not be written (No space left on device)"
    expected = full if failure is FULL else (130, "run.py: interrupted")
    assert (code, error.splitlines()[-1]) == expected


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """Links under the name that a page is written by lead nowhere."""
    file, precious = tmp_path / "page.html", tmp_path / "precious"
    plan = Options("ar").plan(random_llama(0).config)
    recorder = Recorder(None, [1], {}, plan)
    with pytest.raises(KeyboardInterrupt), traced(file, recorder):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []  # nothing was begun
    precious.write_text("mine")
    (tmp_path / ".page.html.s2d-partial").symlink_to(precious)
    check_page(file)
    write_page({}, file)
    assert precious.read_text() == "mine" and not file.is_symlink()
    before = file.read_bytes()
    monkeypatch.setattr(page, "as_script", lambda data: "\ud800")  # cannot be encoded
    raises_line(write_page, UnicodeEncodeError, "surrogates", {}, file)
    assert file.read_bytes() == before and len(list(tmp_path.iterdir())) == 3
