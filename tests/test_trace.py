"""A page shows what happened, and nothing else: records against Steps, pages in a real browser."""

import copy
import itertools
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from browser import Browser
from helpers import program as program_of
from helpers import random_llama

import run
from s2d.draft import SortedDraft
from s2d.generate import start
from s2d.proposal import TARGET
from s2d.trace import Recorder, check_page, page, traced
from s2d.trace.page import write_page

QUESTION = "Tell me a story about a robot called Nora and a clever old fisherman."
NAMES = {"target": "T", "draft": "D"}
METHODS = {
    "ar": {},
    "sd": {"exits": [3]},
    "mcsd": {"tree": (3, 2, 1)},
    "s2d": {},
    "s2d-tree": {},
    "roots": {"method": "mcsd", "init": "target", "tree": (3, 2)},
    "replacement": {"method": "mcsd", "replacement": True, "tree": (4, 2)},
}
program = partial(program_of, run.main)
close = partial(pytest.approx, rel=1e-3, abs=1e-12)


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
    recorder, generation = (
        Recorder(tokenizer, prompt, NAMES, options),
        start(target, prompt, **options),
    )
    steps = []
    for step in generation:
        steps.append(step)
        recorder.add(step)
    recorder.time_alone(target, prompt, method="ar")
    if file:
        write_page(recorder.data(), file)
    return json.loads(json.dumps(recorder.data())), steps, generation


@pytest.fixture(scope="module")
def known(mini, tokenizer, tmp_path_factory):
    """known(method, temperature) -> (page, record, Steps, Generation), of an answer."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    prompt = tokenizer.encode_chat([QUESTION])

    def make(name, temperature):
        if (name, temperature) not in made:
            file = folder / f"{name}-{temperature:g}.html"
            more = {"temperature": temperature, "max_new_tokens": 40, "seed": 3}
            options = options_of(name, mini("mini-draft"), **more)
            found = recorded(mini("mini-7b"), tokenizer, prompt, options, file)
            made[name, temperature] = (file, *found)
        return made[name, temperature]

    return make


def plain_residual(p, q):
    left = [max(0.0, a - b) for a, b in zip(p, q)]
    return [each / sum(left) for each in left] if sum(left) else p


def rejected_in(position, p, q, tree, replacement):
    """Compare the tests of a position with rows of p and q, in plain Python: how many reject."""
    rejected = 0
    for number, test in enumerate(position["tests"]):
        token = tree.tokens[test["node"]].item()
        assert (test["p"], test["q"]) == (close(p[token]), close(q[token]))
        acceptance = min(1.0, p[token] / q[token])
        assert test["acceptance"] == close(acceptance)
        if abs(test["draw"] - acceptance) > 1e-3:  # both are recorded with four digits
            assert test["accepted"] == (test["draw"] < acceptance)
        if not test["accepted"]:
            rejected += 1
            p = plain_residual(p, q)
            if not replacement:
                q = [0.0 if other == token else each for other, each in enumerate(q)]
                q = [each / (sum(q) or 1.0) for each in q]
            stage = position["stages"][number + 1]
            assert stage["p"] == close([p[each] for each in position["ids"]])
            assert stage["q"] == close([q[each] for each in position["ids"]])
    return rejected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_a_record_is_what_happened(name, temperature, known, tokenizer):
    """Every number again, from the Step itself."""
    _, data, steps, generation = known(name, temperature)
    about, stats = data["about"], generation.stats
    assert "".join(data["answer"]) == tokenizer.decode(generation.tokens)
    assert len(data["answer"]) == len(generation.tokens)
    assert sum((step["tokens"] for step in data["steps"]), []) == generation.tokens
    assert [len(step["tokens"]) for step in data["steps"]] == stats.accept_lengths
    drafted = sum(source != TARGET for step in data["steps"] for source in step["sources"])
    roots = sum(bool(step.verdict.path) for step in steps) if name == "roots" else 0
    assert drafted == stats.accepted - roots
    rejected = 0
    for shown, step in zip(data["steps"], steps, strict=True):
        tree, path = step.proposal.tree, step.verdict.path
        assert (shown["n"], shown["path"]) == (step.n, path)
        assert shown["nodes"]["tokens"] == tree.tokens.tolist()
        assert shown["nodes"]["parents"] == tree.parents.tolist()
        assert [level["exit"] for level in shown["levels"]] == step.proposal.exits
        for level in shown["levels"]:
            *below, last = level["confidences"] or [[TARGET, 1.0]]
            assert last[0] == level["exit"]
            for exit_layer, confidence in below:
                assert confidence <= about["thresholds"][about["exits"].index(exit_layer)]
        p = torch.softmax(step.logits / (temperature or 1.0), dim=-1).tolist()
        for token, parent, shown_p in zip(
            *(shown["nodes"][key] for key in ("tokens", "parents", "p"))
        ):
            assert shown_p == close(p[parent + 1][token])
        for position, node, accepted in zip(
            shown["positions"], [-1, *path], [*path, None], strict=True
        ):
            row, tests, ids = p[node + 1], position["tests"], position["ids"]
            assert position["accepted"] == accepted
            assert position["stages"][0]["p"] == close([row[token] for token in ids])
            assert max(range(len(row)), key=row.__getitem__) in ids
            root = name == "roots" and node == -1
            now_accepted = [test["node"] for test in tests if test["accepted"]]
            assert now_accepted == ([] if root or accepted is None else [accepted])
            if tests and "acceptance" in tests[0]:
                q = step.proposal.q[node + 1].tolist()
                rejected += rejected_in(position, row, q, tree, name == "replacement")
        draws = [
            test["draw"] for each in shown["positions"] for test in each["tests"] if "draw" in test
        ]
        assert draws == close([draw.item() for draw in step.verdict.draws])
        bonus = [each["bonus"] for each in shown["positions"] if each["bonus"] is not None]
        assert bonus == step.tokens[len(path) :]
        target_cache = {"name": "target", "filled": step.n + len(tree), "kept": step.n + len(path)}
        assert shown["caches"][0] == target_cache
        for cache in shown["caches"]:
            assert step.n <= cache["kept"] <= cache["filled"] or cache["filled"] <= step.n
        seconds = step.draft_seconds, step.target_seconds
        seconds = *seconds, step.seconds - sum(seconds)
        assert shown["ms"] == pytest.approx([1000 * each for each in seconds], rel=1e-2)
    assert bool(rejected) == (temperature > 0 and name in ("sd", "mcsd", "s2d", "replacement"))


def test_caches_hold_what_the_record_says(mini, tokenizer, monkeypatch):
    """Their real lengths, before and after every step."""
    lengths, keep = [], SortedDraft.keep

    def watched(self, *what):
        before = [segment.cache.length for segment in self.segments]
        keep(self, *what)
        lengths.append((before, [segment.cache.length for segment in self.segments]))

    monkeypatch.setattr(SortedDraft, "keep", watched)
    options = options_of("s2d-tree", mini("mini-draft"), max_new_tokens=40)
    data, *_ = recorded(mini("mini-7b"), tokenizer, tokenizer.encode_chat([QUESTION]), options)
    shown = [
        tuple([cache[key] for cache in step["caches"][1:]] for key in ("filled", "kept"))
        for step in data["steps"]
    ]
    assert shown == lengths and len({tuple(before) for before, _ in lengths}) > 3


def test_why_drafting_stopped(mini, tokenizer):
    def never(prediction):
        return torch.zeros(len(prediction.probs))

    never.threshold = 0.5
    prompt, draft = tokenizer.encode_chat([QUESTION]), mini("mini-draft")
    for options, reasons in (
        ({"method": "sd", "draft_length": 3, "stop": 0.0}, {"length", "context"}),
        ({"method": "sd", "stop": 1.0}, {"confidence", "context"}),
        ({"method": "sd", "stop": never}, {"policy", "context"}),
        ({"method": "s2d", "stop": 0.5, "draft_length": 3}, {"confidence", "length", "context"}),
    ):
        options |= {"draft": draft, "max_new_tokens": 30}
        data, *_ = recorded(mini("mini-7b"), tokenizer, prompt, options)
        assert {step["stopped"] for step in data["steps"]} == reasons, options
        assert data["steps"][-1]["stopped"] == "context"  # where the last tokens are
        for step in data["steps"]:
            if step["stopped"] == "confidence":
                exit_layer, confidence = step["gave_up"][-1]
                assert exit_layer == data["about"]["exits"][-1] and confidence < options["stop"]
            if step["stopped"] == "length":
                assert len(step["levels"]) == options["draft_length"] and step["gave_up"] is None


class Hostile:
    """A tokenizer whose every token is something to be careful with."""

    SCRIPTS = (
        "</script><script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked = 1'>",
    )
    TEXTS = (*SCRIPTS, "\"'`&amp;", "שלום", "👩‍🔬", "\n", "\u2028", "${1}", "")

    def decode(self, ids):
        return "".join(self.TEXTS[token % len(self.TEXTS)] for token in ids)

    def encode(self, text):
        return [8]


@pytest.mark.parametrize("method", ["s2d", "mcsd"])
def test_texts_are_shown_and_run_nothing(method, browser, tmp_path):
    target = random_llama(0, eos_token_ids=())
    draft = random_llama(1, eos_token_ids=(), exit_layers=(2, 4), thresholds=(0.5, 0.0))
    options = {"method": method, "draft": draft, "temperature": 1.0, "max_new_tokens": 60}
    file = tmp_path / "page.html"
    data, _, generation = recorded(target, Hostile(), [0, 1, 2, 3, 4, 5], options, file)
    browser.open(file)
    assert browser.complaints() == []
    assert browser.text("#answer") == Hostile().decode(generation.tokens)
    assert browser.text("#prompt") == Hostile().decode(range(6))
    browser.script("all('#answer span').forEach((each) => each.click())")
    found = "return [typeof window.hacked, document.images.length, document.scripts.length]"
    assert browser.script(found) == ["undefined", 0, 2]
    assert browser.complaints() == []
    drafted = {token for step in data["steps"] for token in step["nodes"]["tokens"]}
    assert len({data["pieces"][str(token)] for token in drafted}) > 5


ALL_STEPS = """
const texts = (selector) => all(selector).map((each) => each.textContent);
return Array.from({ length: arguments[0] }, (_, number) => {
  if (number) document.getElementById("next").click();
  const width = (bar) => parseFloat(bar.style.width);
  const attends = (row) => all(".cell", row).map((cell) => cell.classList.contains("attended"));
  const accepted = (node) => node.classList.contains("accepted");
  return {
    number: texts("#step-number")[0],
    stopped: texts("#node")[0],
    nodes: all("#tree g[data-node]").map((each) => [+each.dataset.node, accepted(each)]),
    mask: all("#mask g[data-row]").map((row) => attends(row).slice(1)),
    positions: all("#positions button").map((button) => {
      button.focus();
      const widths = all("#tests tbody tr").map((row) => all("i", row).map(width));
      return { lines: texts("#tests > p").join(" "), widths };
    }),
    caches: texts("#caches > div:not(.strip)").map((text) => text.match(/\\d+(?=,|$)/g).map(Number)),
  };
});
"""


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("s2d", 0.0),
        ("mcsd", 1.0),
        ("s2d-tree", 0.0),
        ("s2d-tree", 1.0),
        ("ar", 0.0),
        ("roots", 1.0),
    ],
)
def test_the_page_shows_the_record(name, temperature, known, browser, tokenizer):
    """Tokens, tree, mask rows, tests and caches of every step, as the browser has them."""
    file, data, steps, generation = known(name, temperature)
    browser.open(file)
    assert browser.complaints() == []
    assert browser.text("#answer") == tokenizer.decode(generation.tokens)
    first_class = "return all('#answer span').map((each) => each.className.split(' ')[0])"
    numbers = {TARGET: 0} | {
        exit_layer: i for i, exit_layer in enumerate(data["about"]["exits"], 1)
    }
    sources = [source for step in data["steps"] for source in step["sources"]]
    assert browser.script(first_class) == [f"source{numbers[source]}" for source in sources]
    on_page = browser.script(ALL_STEPS, len(steps))
    for number, (seen, shown, step) in enumerate(
        zip(on_page, data["steps"], steps, strict=True), 1
    ):
        tree = step.proposal.tree
        assert seen["number"] == f"{number} of {len(steps)}" and seen["stopped"]
        assert seen["nodes"] == [[node, node in step.verdict.path] for node in range(len(tree))]
        assert seen["mask"] == tree.ancestors.tolist()
        for each, position in zip(seen["positions"], shown["positions"], strict=True):
            accepted = sum(test["accepted"] for test in position["tests"])
            assert each["lines"].count(": accepted") == accepted
            assert each["lines"].count(": rejected") == len(position["tests"]) - accepted
            assert ("bonus" in each["lines"]) == (position["bonus"] is not None)
            columns = [stage[key] for stage in position["stages"] for key in ("p", "q")]
            rows = zip(*(column for column in columns if column is not None))
            wanted = [[100 * probability for probability in row] for row in rows]
            assert each["widths"] == [pytest.approx(row, abs=0.006) for row in wanted]
        # "draft, layers 1 to 2: filled 70, kept 68, rolled back 2"
        counts = [(cache["filled"], cache["kept"]) for cache in shown["caches"]]
        assert [row[-3:] for row in seen["caches"]] == [[a, b, a - b] for a, b in counts]
    assert browser.complaints() == []


def test_exit_0_is_the_table_and_not_the_target(known, browser, tmp_path):
    """The record of an answer whose first exit, 2, is renamed."""
    _, data, *_ = known("s2d", 1.0)
    text = re.sub(r'"exits": \[2,', '"exits": [0,', json.dumps(data))
    data = json.loads(re.sub(r'"exit": 2\b', '"exit": 0', text))
    for step in data["steps"]:
        step["sources"] = [0 if source == 2 else source for source in step["sources"]]
    write_page(data, tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    sources = [source for step in data["steps"] for source in step["sources"]]
    legend = browser.texts("#legend span")
    assert {f"the target: {sources.count(TARGET)}", f"the table: {sources.count(0)}"} < set(legend)
    first = sources.index(0)
    assert "source1" in browser.script("return all('#answer span')[arguments[0]].className", first)
    assert browser.complaints() == []


def test_every_control_works_by_mouse_and_keyboard(known, browser):
    file, data, steps, generation = known("mcsd", 1.0)
    browser.open(file)

    def step():
        return int(browser.text("#step-number").split()[0])

    def go_to(number):
        browser.focus("#slider")
        browser.press("Home", *["Right"] * (number - 1))

    browser.click("#next")
    browser.click("#next")
    browser.click("#previous")
    assert step() == 2
    browser.script("document.activeElement.blur()")
    browser.press("Right", "Right", "Left")
    assert step() == 3
    browser.focus("#slider")
    browser.press("End")
    assert step() == len(steps)
    go_to(2)
    assert step() == 2
    # The answer: one stop for Tab, arrow keys within; focus shows, Enter goes to the step.
    last = len(generation.tokens) - 1
    browser.focus("#answer span")
    browser.press("End")
    assert f"token {last + 1} of" in browser.text("#token") and step() == 2
    browser.press("Enter")
    assert step() == len(steps)
    browser.press("Home")
    assert "token 1 of" in browser.text("#token")
    browser.hover("#answer span", 4)
    assert "token 5 of" in browser.text("#token")
    browser.click("#answer span", last)
    assert step() == len(steps)
    assert browser.script("return all('#answer span[tabindex=\"0\"]').length") == 1
    # Tree and mask light up together.
    number = next(i for i, each in enumerate(data["steps"], 1) if len(each["nodes"]["tokens"]) > 6)
    go_to(number)
    parents = data["steps"][number - 1]["nodes"]["parents"]
    deepest = len(parents) - 1
    above = {deepest}
    while parents[min(above)] >= 0:
        above.add(parents[min(above)])
    numbers = "all('{}').map((each) => +each.dataset.{})"
    places = ("#tree .lit", "node"), ("#mask .column.lit", "column"), ("#mask g.lit", "row")
    lit = "return [{}]".format(", ".join(numbers.format(*place) for place in places))
    for part, way in itertools.product(
        ("#tree g[data-node]", "#mask g[data-row]"), ("mouse", "keys")
    ):
        browser.hover("h1")
        browser.script("all('.lit').forEach((each) => each.classList.remove('lit'))")
        if way == "mouse":
            browser.hover(part, deepest)
        else:
            browser.focus(part)
            browser.press("End")
        assert browser.script(lit) == [sorted(above), sorted(above), [deepest]], (part, way)
        assert f"Node {deepest}" in browser.text("#node")
    # The Tab key comes to the step that is shown, and an address names one.
    go_to(3)
    assert browser.script("return all('#time g').map((each) => each.tabIndex).indexOf(0)") == 2
    browser.focus("#time g", 2)
    assert step() == 3
    browser.focus("#answer span")
    browser.press("End")
    browser.script("location.hash = '#step-2'")
    assert step() == 2
    # Positions, bars of time, and the code.
    go_to(next(i for i, each in enumerate(data["steps"], 1) if len(each["positions"]) > 2))
    browser.hover("#positions button", 1)
    second = browser.text("#tests")
    browser.focus("#positions button")
    assert browser.text("#tests") != second
    browser.press("Right")
    assert browser.text("#tests") == second
    browser.click("#positions button", 0)
    assert browser.text("#tests") != second
    browser.click("#time g", 1)
    assert step() == 2
    browser.press("End")
    assert step() == len(steps)
    links = browser.texts("a[href^='#code-']")
    for link, text in enumerate(links):
        browser.click("a[href^='#code-']", link)
        path, name = text.split(": ")
        details = "const [code] = all(`[id='code-${arguments[0]}']`);"
        is_open, source = browser.script(
            details + "return [code.open, code.lastChild.textContent]", name
        )
        assert is_open and f"def {name.split('.')[-1]}(" in source
        assert source in (run.WEIGHTS.parent / path).read_text()
    names = {text.split(": ")[1] for text in links}
    assert {"verify_sampled", "residual", "ancestor_mask", "KVCache.keep", "decode_step"} <= names
    browser.click("summary", 0)
    assert browser.complaints() == []


def luminance(color):
    parts = (each / 255 for each in color)
    parts = [each / 12.92 if each <= 0.04 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts))


def test_it_is_readable_in_light_and_dark(known, browser):
    """Text and its background differ by 4.5 to 1 at least (WCAG 2.2, 1.4.3), in every colour."""
    browser.open(known("s2d", 1.0)[0])
    papers = []
    for dark in (False, True):
        browser.dark(dark)
        paper, *inks = browser.script("""
            const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const texts = all('#answer span:not(.lit), .why, h2, #legend span');
            const colors = new Set(texts.map((each) => getComputedStyle(each).color));
            return [getComputedStyle(document.body).backgroundColor, ...colors].map(parts)""")
        papers.append(paper)
        for ink in inks:
            low, high = sorted((luminance(ink), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) > 4.5, (dark, ink)
        assert len(inks) >= 3
    browser.dark(False)
    assert papers[0] != papers[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["ar", "mcsd", "s2d", "s2d-tree"])
def test_a_page_is_small_and_needs_no_network(name, temperature, mini, tokenizer, tmp_path):
    more = {"temperature": temperature, "max_new_tokens": 128}
    options = options_of(name, mini("mini-draft"), **more)
    options.pop("tree", None)  # the default's 44 nodes
    target = copy.copy(mini("mini-7b"))
    target.config = replace(target.config, eos_token_ids=())  # 128 tokens, whatever they are
    file = tmp_path / "page.html"
    *_, generation = recorded(target, tokenizer, tokenizer.encode_chat([QUESTION]), options, file)
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
    monkeypatch.setattr(run, "load_model", None)  # nothing is even loaded
    for name in ("mine.html", "folder.html", "link.html", "none/page.html", "mine.html/page.html"):
        assert program("--target", "7b", "--trace", tmp_path / name) == 2
        out, error = capsys.readouterr()
        assert error.count("\n") == 1 and error.startswith("run.py: ") and name in error
        assert out == ""
    assert (tmp_path / "mine.html").read_text().endswith("mine")
    assert len(list(tmp_path.iterdir())) == 3


def test_run_writes_a_page_and_the_same_answer(tmp_path, capsys):
    """With --trace the answer is the same; a page of ours is replaced by the next."""
    arguments = "--target", "7b", "--prompt", QUESTION, "--dtype", "float64"
    trace = "--trace", tmp_path / "page.html"
    answers = []
    for more in ((), trace, ("--json",), ("--json", *trace)):
        assert program(*arguments, *more) == 0
        out, error = capsys.readouterr()
        answers.append(json.loads(out)["text"] if "--json" in more else out.partition("\n\n")[0])
        assert (f"every step: {tmp_path / 'page.html'}" in error) == (len(more) > 1)
    assert len(set(answers)) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    check_page(tmp_path / "page.html")


def test_an_interrupted_answer_still_has_its_page(tmp_path, monkeypatch, capsys, browser):
    add, count = run.Streamed.add, itertools.count()

    def interrupted(self, step):
        if next(count) == 3:
            raise KeyboardInterrupt
        add(self, step)

    monkeypatch.setattr(run.Streamed, "add", interrupted)
    assert program("--target", "7b", "--prompt", QUESTION, "--trace", tmp_path / "page.html") == 130
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == [] and browser.text("#step-number") == "1 of 3"
    assert capsys.readouterr().out.startswith(browser.text("#answer"))


def test_a_page_of_steps_that_emitted_nothing(browser, mini, tokenizer, tmp_path):
    """Roots of the target: a page of only the first step has no token to show."""
    options = options_of("roots", mini("mini-draft"), max_new_tokens=20)
    prompt, file = tokenizer.encode_chat([QUESTION]), tmp_path / "page.html"
    with traced(file, Recorder(tokenizer, prompt, NAMES, options)) as recorder:
        step = next(iter(start(mini("mini-7b"), prompt, **options)))
        assert step.tokens == []
        recorder.add(step)
    browser.open(file)
    assert browser.complaints() == [] and browser.text("#step-number") == "1 of 1"
    assert browser.text("#answer") == ""


def test_an_answer_is_not_lost_with_its_page(tmp_path, monkeypatch, capsys):
    """The disk is full at the end, or the timing of the target alone is interrupted."""
    file = tmp_path / "page.html"
    arguments = "--target", "7b", "--prompt", QUESTION, "--json", "--trace", file

    def full(data, file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("s2d.trace.write_page", full)
        assert program(*arguments) == 2
    out, error = capsys.readouterr()
    expected = f"run.py: {file} could not be written (No space left on device)"
    assert json.loads(out)["tokens"] and error.splitlines()[-1] == expected

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "time_alone", interrupted)
    assert program(*arguments) == 130
    assert json.loads(capsys.readouterr().out)["tokens"] and file.is_file()


def test_files_beside_a_page_are_left_alone(tmp_path):
    """Links under the name that a page is written by lead nowhere; a link is not replaced."""
    file, link = tmp_path / "page.html", tmp_path / "link.html"
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".page.html.s2d-partial").symlink_to(tmp_path / "precious")
    check_page(file)
    assert (tmp_path / ".page.html.s2d-partial").is_symlink()
    write_page({}, file)
    assert (tmp_path / "precious").read_text() == "mine" and not file.is_symlink()
    link.symlink_to(file)
    with pytest.raises(ValueError, match="in the way"):
        check_page(link)


def test_nothing_is_written_where_nothing_was_begun(tmp_path):
    recorder = Recorder(Hostile(), [1], {}, {"method": "ar"})
    with pytest.raises(KeyboardInterrupt), traced(tmp_path / "page.html", recorder):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_half_a_page_is_never_there(tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    write_page({}, file)
    before = file.read_bytes()
    monkeypatch.setattr(page, "as_script", lambda data: "\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        write_page({}, file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", METHODS)
def test_a_draft_vocabulary_and_bfloat16_are_recorded_too(name, temperature, tmp_path):
    """Whatever a model is, every way of drafting: records are made, and say what was emitted."""
    exits = {"exit_layers": (1, 2, 4), "thresholds": (0.4, 0.6, 0.0), "eos_token_ids": (5,)}
    target, draft = random_llama(0, **exits).bfloat16(), random_llama(1, **exits).bfloat16()
    draft.keep_tokens(torch.arange(3, 40))
    options = options_of(name, draft, temperature=temperature, max_new_tokens=30)
    data, _, generation = recorded(target, Hostile(), [3, 1, 4], options, tmp_path / "page.html")
    assert sum((step["tokens"] for step in data["steps"]), []) == generation.tokens
