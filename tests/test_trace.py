"""A page shows what happened, and nothing else: records against a count made here, and the page in a real browser."""

import itertools
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from browser import Browser
from helpers import WEIGHTS, random_llama
from helpers import program as program_of

import run
from s2d import generate, load_model
from s2d.sampling import warp
from s2d.trace import Recorder, check_page, page, traced
from s2d.trace.page import write_page

QUESTION = "Tell me a story about a robot called Nora and a clever old fisherman."
METHODS = {
    "ar": {}, "sd": {"exits": [3]}, "mcsd": {"tree": (3, 2, 1)}, "s2d": {}, "s2d-tree": {}, "auto": {},
    "lossy": {"method": "mcsd", "init": "target", "tree": (3, 2)}, "replacement": {"method": "mcsd", "replacement": True, "tree": (4, 2)},
}  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    driven = Browser()
    yield driven
    driven.close()


def options_of(name, draft, **more):
    options = {"method": name, **METHODS[name], **more}
    return options | {"draft": None if options["method"] == "ar" else draft}


def recorded(target, draft, tokenizer, prompt, options, file=None):
    """(what was recorded, the Steps themselves, the Output)"""
    steps = []
    recorder = Recorder(tokenizer, prompt, {"target": "T", "draft": "D"}, options, steps.append)
    output = generate(target, prompt, **options, on_step=recorder)
    recorder.time_alone(generate, target, prompt, method="ar")
    if file:
        write_page(recorder.data(), file)
    return json.loads(json.dumps(recorder.data())), steps, output


@pytest.fixture(scope="module")
def known(mini, tokenizer, tmp_path_factory):
    """known(method, temperature) -> (page, record, Steps, Output), of an answer of a miniature."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    prompt = tokenizer.encode_chat([QUESTION])

    def make(name, temperature):
        if (name, temperature) not in made:
            file = folder / f"{name}-{temperature:g}.html"
            options = options_of(
                name, mini("mini-draft"), temperature=temperature, max_new_tokens=40, seed=3
            )
            made[name, temperature] = (
                file,
                *recorded(mini("mini-7b"), mini("mini-draft"), tokenizer, prompt, options, file),
            )
        return made[name, temperature]

    return make


def plain_residual(p, q):
    left = [max(0.0, a - b) for a, b in zip(p, q)]
    return [each / sum(left) for each in left] if sum(left) else p


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_a_record_is_what_happened(name, temperature, known, tokenizer):
    """Every number again, from the Step itself, in plain Python."""
    _, data, steps, output = known(name, temperature)
    assert "".join(data["answer"]) == tokenizer.decode(output.tokens) and len(
        data["answer"]
    ) == len(output.tokens)
    assert sum((step["tokens"] for step in data["steps"]), []) == output.tokens
    assert [len(step["tokens"]) for step in data["steps"]] == output.stats.accept_lengths
    drafted = sum(exit_layer > 0 for step in data["steps"] for exit_layer in step["sources"])
    assert drafted == output.stats.accepted - (name == "lossy") * sum(
        bool(step.path) for step in steps
    )
    rejected = 0
    for shown, step in zip(data["steps"], steps, strict=True):
        tree = step.proposal.tree
        assert (shown["n"], shown["path"]) == (step.n, step.path)
        assert (
            shown["nodes"]["tokens"] == tree.tokens.tolist()
            and shown["nodes"]["parents"] == tree.parents.tolist()
        )
        assert [level["exit"] for level in shown["levels"]] == step.proposal.exits
        for level in shown["levels"]:
            if level["exit"]:
                assert level["looks"][-1][0] == level["exit"]
                for exit_layer, confidence in level["looks"][:-1]:
                    assert (
                        not data["about"]["thresholds"]
                        or confidence
                        <= data["about"]["thresholds"][data["about"]["exits"].index(exit_layer)]
                    )
        p = warp(step.logits, temperature or 1.0).tolist()
        assert len(shown["places"]) == len(step.path) + 1
        for depth, place in enumerate(shown["places"]):
            row = p[place["row"]]
            assert place["row"] == (step.path[depth - 1] + 1 if depth else 0)
            assert place["stages"][0]["p"] == pytest.approx(
                [row[token] for token in place["ids"]], rel=1e-3, abs=1e-30
            )
            assert max(range(len(row)), key=row.__getitem__) in place["ids"]
            stays = [test["node"] for test in place["tests"] if test["stays"]]
            given = name == "lossy" and depth == 0
            assert given or stays == ([step.path[depth]] if depth < len(step.path) else [])
            if place["tests"] and "chance" in place["tests"][0]:
                q = step.proposal.q[place["row"]].tolist()
                for number, test in enumerate(place["tests"]):
                    token = tree.tokens[test["node"]].item()
                    assert (test["p"], test["q"]) == (
                        pytest.approx(row[token], rel=1e-3, abs=1e-30),
                        pytest.approx(q[token], rel=1e-3),
                    )
                    assert test["chance"] == pytest.approx(
                        min(1.0, row[token] / q[token]), rel=1e-3, abs=1e-30
                    )
                    assert (test["draw"] < test["chance"] or test["chance"] == 1) == test[
                        "stays"
                    ] or abs(test["draw"] - test["chance"]) < 1e-3
                    if not test["stays"]:
                        rejected += 1
                        row = plain_residual(row, q)
                        if name != "replacement":
                            q = [0.0 if other == token else each for other, each in enumerate(q)]
                            q = [each / (sum(q) or 1.0) for each in q]
                        stage = place["stages"][number + 1]
                        assert stage["p"] == pytest.approx(
                            [row[each] for each in place["ids"]], rel=1e-3, abs=1e-12
                        )
                        assert stage["q"] == pytest.approx(
                            [q[each] for each in place["ids"]], rel=1e-3, abs=1e-12
                        )
        assert (
            sum("draw" in test for place in shown["places"] for test in place["tests"])
            == shown["draws"]
            == len(step.draws)
        )
        assert shown["caches"][0] == {
            "name": "target",
            "held": step.n + len(tree),
            "kept": step.n + len(step.path),
        }
        assert all(
            step.n <= cache["kept"] <= cache["held"] or cache["held"] <= step.n
            for cache in shown["caches"]
        )
        assert shown["ms"] == pytest.approx([1000 * step.draft_seconds, 1000 * step.target_seconds,
                                             1000 * (step.seconds - step.draft_seconds - step.target_seconds)], rel=1e-2)  # fmt: skip
        assert (shown["plan"] is None) == (name != "auto")
    if temperature and name in ("sd", "mcsd", "s2d", "replacement"):
        assert rejected


def test_caches_hold_what_the_record_says(mini, tokenizer):
    """Their real lengths, before and after every step."""
    from s2d.draft import SortedDraft

    lengths, prompt = [], tokenizer.encode_chat([QUESTION])
    keep = SortedDraft.keep

    def watched(self, n, slots):
        before = [segment.cache.length for segment in self.segments]
        keep(self, n, slots)
        lengths.append((before, [segment.cache.length for segment in self.segments]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SortedDraft, "keep", watched)
        options = options_of("s2d-tree", mini("mini-draft"), max_new_tokens=40)
        data, _, _ = recorded(mini("mini-7b"), mini("mini-draft"), tokenizer, prompt, options)
    shown = [
        (
            [cache["held"] for cache in step["caches"][1:]],
            [cache["kept"] for cache in step["caches"][1:]],
        )
        for step in data["steps"]
    ]
    assert shown == lengths and len({tuple(before) for before, _ in lengths}) > 3


def test_why_drafting_stopped(mini, tokenizer):
    prompt, target, draft = tokenizer.encode_chat([QUESTION]), mini("mini-7b"), mini("mini-draft")
    for options, reasons in (
        ({"method": "sd", "draft_length": 3, "stop": 0.0}, {"length"}), ({"method": "sd", "stop": 1.0}, {"confidence"}),
        ({"method": "auto"}, {"rate"}), ({"method": "s2d", "stop": 0.5, "draft_length": 3}, {"confidence", "length"}),
    ):  # fmt: skip
        data, steps, _ = recorded(
            target, draft, tokenizer, prompt, {"draft": draft, "max_new_tokens": 30, **options}
        )
        assert {step["stopped"] for step in data["steps"]} - {"room"} == reasons, options
        assert (
            options["method"] != "sd" or data["steps"][-1]["stopped"] == "room"
        )  # where the last tokens are
        for step in data["steps"]:
            if step["stopped"] == "confidence":
                assert (
                    step["gave_up"][-1][1] < options["stop"]
                    and step["gave_up"][-1][0] == data["about"]["exits"][-1]
                )
            if step["stopped"] == "length":
                assert len(step["levels"]) == options["draft_length"] and step["gave_up"] is None


class Hostile:
    """A tokenizer whose every token is something to be careful with."""

    TEXTS = (
        "</script><script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked = 1'>",
        "\"'`&amp;",
        "שלום",
        "👩‍🔬",
        "\n",
        "\u2028",
        "${1}",
        "",
    )

    def decode(self, ids):
        return "".join(self.TEXTS[token % len(self.TEXTS)] for token in ids)

    def encode(self, text):
        return [8]


@pytest.mark.parametrize("method", ["s2d", "mcsd"])
def test_texts_are_shown_and_run_nothing(method, browser, tmp_path):
    target, draft = (
        random_llama(0, eos_token_ids=()),
        random_llama(1, eos_token_ids=(), exit_layers=(2, 4), thresholds=(0.5, 0.0)),
    )
    options = {"method": method, "draft": draft, "temperature": 1.0, "max_new_tokens": 60}
    data, _, output = recorded(
        target, draft, Hostile(), [0, 1, 2, 3, 4, 5], options, tmp_path / "page.html"
    )
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == []
    assert browser.text("#answer") == Hostile().decode(output.tokens) and browser.text(
        "#prompt"
    ) == Hostile().decode(range(6))
    for number in range(len(output.tokens)):
        browser.script("document.querySelectorAll('#answer span')[arguments[0]].click()", number)
    assert browser.script(
        "return [typeof window.hacked, document.images.length, document.scripts.length]"
    ) == ["undefined", 0, 2]
    assert browser.complaints() == []
    names = {
        name
        for step in data["steps"]
        for token in step["nodes"]["tokens"]
        for name in [data["pieces"][str(token)]]
    }
    assert len(names) > 5


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("s2d", 0.0), ("mcsd", 1.0), ("s2d-tree", 0.0), ("auto", 1.0), ("ar", 0.0), ("lossy", 1.0)],
)
def test_the_page_shows_the_record(name, temperature, known, browser, tokenizer):
    """Tokens, tree, mask rows, tests and caches of every step, as the browser has them."""
    file, data, steps, output = known(name, temperature)
    browser.open(file)
    assert browser.complaints() == []
    assert browser.text("#answer") == tokenizer.decode(output.tokens)
    classes = browser.script(
        "return [...document.querySelectorAll('#answer span')].map((each) => each.className.split(' ')[0])"
    )
    exits = data["about"]["exits"]
    sources = [source for step in data["steps"] for source in step["sources"]]
    assert classes == [f"source{exits.index(source) + 1 if source else 0}" for source in sources]
    browser.focus("#slider")
    browser.press("Home")
    for number, (shown, step) in enumerate(zip(data["steps"], steps)):
        assert browser.text("#step-number") == f"{number + 1} of {len(steps)}"
        nodes = browser.script(
            "return [...document.querySelectorAll('#tree g[data-node]')].map((each) => [+each.dataset.node, each.classList.contains('accepted')])"
        )
        assert nodes == [[node, node in step.path] for node in range(len(step.proposal.tree))]
        mask = browser.script("return [...document.querySelectorAll('#mask g[data-row]')].map((row) => "
                              "[...row.querySelectorAll('.cell')].slice(1).map((cell) => cell.classList.contains('seen')))")  # fmt: skip
        assert mask == step.proposal.tree.ancestors.tolist()
        assert len(browser.texts("#places button")) == len(step.path) + 1
        for place, each in enumerate(shown["places"]):
            browser.script(
                "document.querySelectorAll('#places button')[arguments[0]].focus()", place
            )
            said = " ".join(browser.texts("#tests > p"))
            assert said.count("it stays") == sum(test["stays"] for test in each["tests"])
            assert said.count("rejected") == sum(not test["stays"] for test in each["tests"])
            widths = browser.script(
                "return [...document.querySelectorAll('#tests tbody tr')].map((row) => [...row.querySelectorAll('i')].map((bar) => parseFloat(bar.style.width)))"
            )
            columns = [
                column
                for stage in each["stages"]
                for column in (stage["p"], stage["q"])
                if column is not None
            ]
            assert len(widths) == len(each["ids"])
            for row, line in zip(zip(*columns), widths):
                assert line == pytest.approx([100 * chance for chance in row], abs=0.06)
        kept = [
            tuple(map(int, re.search(r"held (\d+), keeps (\d+)", text).groups()))
            for text in browser.texts("#caches > div:not(.strip)")
        ]
        assert kept == [(cache["held"], cache["kept"]) for cache in shown["caches"]]
        assert ("Expected" in browser.text("#plan")) == (name == "auto")
        browser.focus("#slider")
        browser.press("Right")
    assert browser.complaints() == []


def test_every_control_works_by_mouse_and_keyboard(known, browser):
    file, data, steps, output = known("mcsd", 1.0)
    browser.open(file)
    step = lambda: int(browser.text("#step-number").split()[0])  # noqa: E731
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
    browser.press("Home", "Right")
    assert step() == 2
    # The answer: one stop for Tab, arrow keys within; focus shows, Enter goes to the step.
    last = len(output.tokens) - 1
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
    assert (
        browser.script("return document.querySelectorAll('#answer span[tabindex=\"0\"]').length")
        == 1
    )
    # Tree and mask light up together.
    number = next(i for i, each in enumerate(data["steps"]) if len(each["nodes"]["tokens"]) > 6)
    browser.focus("#slider")
    browser.press("Home", *["Right"] * number)
    parents = data["steps"][number]["nodes"]["parents"]
    deepest = len(parents) - 1
    lit = "return [[...document.querySelectorAll('#tree .lit')].map((each) => +each.dataset.node), [...document.querySelectorAll('#mask .column.lit')].map((each) => +each.dataset.column), [...document.querySelectorAll('#mask g.lit')].map((each) => +each.dataset.row)]"  # noqa: E501
    above = {deepest}
    while parents[min(above)] >= 0:
        above.add(parents[min(above)])
    for way in ("mouse on the tree", "mouse on the mask", "keys in the tree", "keys in the mask"):
        part = "#tree g[data-node]" if "tree" in way else "#mask g[data-row]"
        browser.hover("h1")
        browser.script(
            "document.querySelectorAll('.lit').forEach((each) => each.classList.remove('lit'))"
        )
        if "mouse" in way:
            browser.hover(part, deepest)
        else:
            browser.focus(part)
            browser.press("End")
        assert browser.script(lit) == [sorted(above), sorted(above), [deepest]], way
        assert f"node {deepest}" in browser.text("#node")
    # The Tab key comes to the step that is shown, and an address names one.
    browser.focus("#slider")
    browser.press("Home", "Right", "Right")
    assert (
        browser.script(
            "return [...document.querySelectorAll('#time g')].map((each) => each.tabIndex).indexOf(0)"
        )
        == 2
    )
    browser.focus("#time g", 2)
    assert step() == 3
    browser.focus("#answer span")
    browser.press("End")
    browser.script("location.hash = '#step-2'")
    assert step() == 2
    # Places, bars of time, and the code.
    number = next(i for i, each in enumerate(data["steps"]) if len(each["places"]) > 2)
    browser.focus("#slider")
    browser.press("Home", *["Right"] * number)
    browser.hover("#places button", 1)
    second = browser.text("#tests")
    browser.focus("#places button")
    assert browser.text("#tests") != second
    browser.press("Right")
    assert browser.text("#tests") == second
    browser.click("#places button", 0)
    assert browser.text("#tests") != second
    browser.click("#time g", 1)
    assert step() == 2
    browser.press("End")
    assert step() == len(steps)
    links = browser.texts("a[href^='#code-']")
    for link, text in enumerate(links):
        browser.click("a[href^='#code-']", link)
        name = text.split(": ")[1]
        assert browser.script("return document.getElementById('code-' + arguments[0]).open", name)
        source = browser.script(
            "return document.getElementById('code-' + arguments[0]).querySelector('pre').textContent",
            name,
        )
        assert (
            f"def {name.split('.')[-1]}(" in source
            and source in (run.WEIGHTS.parent / text.split(": ")[0]).read_text()
        )
    assert {"verify_sampled", "residual", "ancestor_mask", "KVCache.keep"} <= {
        text.split(": ")[1] for text in links
    }
    browser.click("summary", 0)
    assert browser.complaints() == []


def test_it_is_readable_in_light_and_dark(known, browser):
    """Text and its background differ by 4.5 to 1 at least (WCAG 2.2, 1.4.3), in every colour of the answer."""
    file, *_ = known("s2d", 1.0)
    browser.open(file)
    papers = []
    for dark in (False, True):
        browser.dark(dark)
        colors = browser.script(
            "const of = (element, name) => getComputedStyle(element)[name].match(/[\\d.]+/g).slice(0, 3).map(Number);"
            "const all = [...document.querySelectorAll('#answer span:not(.lit), .why, h2, #legend span')];"
            "return [of(document.body, 'backgroundColor'), ...new Set(all.map((each) => JSON.stringify(of(each, 'color'))))]"
        )
        paper, *inks = [json.loads(color) if isinstance(color, str) else color for color in colors]
        papers.append(paper)

        def luminance(color):
            parts = [
                each / 255 / 12.92 if each <= 10 else ((each / 255 + 0.055) / 1.055) ** 2.4
                for each in color
            ]
            return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts))

        for ink in inks:
            low, high = sorted((luminance(ink), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) > 4.5, (dark, ink)
        assert len(inks) >= 3
    browser.dark(False)
    assert papers[0] != papers[1]


@pytest.mark.parametrize(
    ("name", "temperature"),
    [*itertools.product(["ar", "mcsd", "s2d", "s2d-tree", "auto"], [0.0, 1.0])],
)
def test_a_page_is_small_and_needs_no_network(name, temperature, tokenizer, tmp_path):
    draft = load_model(WEIGHTS / "mini-draft")
    options = options_of(name, draft, temperature=temperature, max_new_tokens=128)
    options.pop("tree", None)  # the default's 44 nodes
    target, prompt = load_model(WEIGHTS / "mini-7b"), tokenizer.encode_chat([QUESTION])
    target.config = replace(target.config, eos_token_ids=())  # 128 tokens, whatever they are
    _, _, output = recorded(target, draft, tokenizer, prompt, options, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(text.encode()) < 300_000 and len(output.tokens) == 128
    style, script = (
        re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1] for tag in ("style", "script")
    )
    assert (
        "default-src 'none'" in text
        and not re.search(r"url\(|@import", style)
        and not re.search(r"fetch|import\(|XMLHttp|innerHTML|eval", script)
    )
    assert re.findall(r"https?://[^\"'\s]*", script) == ["http://www.w3.org/2000/svg"]


program = partial(program_of, run.main)


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.html").write_text("<!doctype html>\n<p>mine")
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(run, "load_model", None)  # nothing is even loaded
    for name in ("mine.html", "folder.html", "link.html", "none/page.html", "mine.html/page.html"):
        assert program("--target", "7b", "--trace", tmp_path / name) == 2
        out, error = capsys.readouterr()
        assert (
            error.count("\n") == 1 and error.startswith("run.py: ") and name in error and out == ""
        )
    assert (tmp_path / "mine.html").read_text().endswith("mine") and len(
        list(tmp_path.iterdir())
    ) == 3


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_run_writes_a_page_and_the_same_answer(how, tmp_path, capsys):
    """With --trace the answer is the same; a page of ours is replaced by the next."""
    arguments = ["--target", "7b", "--prompt", QUESTION, "--dtype", "float64", *how]
    assert program(*arguments) == 0
    answer = capsys.readouterr().out
    for _ in range(2):
        assert program(*arguments, "--trace", tmp_path / "page.html") == 0
        traced_answer, error = capsys.readouterr()
        if how:
            assert json.loads(answer)["tokens"] == json.loads(traced_answer)["tokens"]
        else:
            assert answer.partition("\n\n")[0] == traced_answer.partition("\n\n")[0]
        assert f"every step: {tmp_path / 'page.html'}" in error
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    check_page(tmp_path / "page.html")


def test_an_interrupted_answer_still_has_its_page(tmp_path, monkeypatch, capsys, browser):
    push, count = run.Streamed.__call__, itertools.count()

    def interrupted(self, step):
        if next(count) == 3:
            raise KeyboardInterrupt
        push(self, step)

    monkeypatch.setattr(run.Streamed, "__call__", interrupted)
    assert program("--target", "7b", "--prompt", QUESTION, "--trace", tmp_path / "page.html") == 130
    browser.open(tmp_path / "page.html")
    assert browser.complaints() == [] and browser.text("#step-number") == "1 of 3"
    assert capsys.readouterr().out.startswith(browser.text("#answer"))


def test_a_page_of_steps_that_emitted_nothing(browser, mini, tokenizer, tmp_path):
    """Roots of the target: interrupted after its first step there is a page, and no token to show."""
    options = options_of("lossy", mini("mini-draft"), max_new_tokens=20)
    prompt, file = tokenizer.encode_chat([QUESTION]), tmp_path / "page.html"

    def interrupt(step):
        assert step.tokens == []

    recorder = Recorder(tokenizer, prompt, {"target": "T", "draft": "D"}, options, interrupt)
    with pytest.raises(AssertionError), traced(file, recorder):
        generate(mini("mini-7b"), prompt, **options, on_step=recorder)
    browser.open(file)
    assert (
        browser.complaints() == []
        and browser.text("#step-number") == "1 of 1"
        and browser.text("#answer") == ""
    )


def test_an_answer_is_not_lost_with_its_page(tmp_path, monkeypatch, capsys):
    """A disk that is full at the end, and an interruption while the target alone is timed: the answer was given before."""

    def full(data, file):
        raise OSError(28, "No space left on device")

    arguments = [
        "--target",
        "7b",
        "--prompt",
        QUESTION,
        "--json",
        "--trace",
        tmp_path / "page.html",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("s2d.trace.write_page", full)
        assert program(*arguments) == 2
        out, error = capsys.readouterr()
        assert (
            json.loads(out)["tokens"]
            and error.splitlines()[-1]
            == f"run.py: {tmp_path / 'page.html'} could not be written (No space left on device)"
        )

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "time_alone", interrupted)
    assert program(*arguments) == 130
    assert json.loads(capsys.readouterr().out)["tokens"] and (tmp_path / "page.html").is_file()


def test_files_beside_a_page_are_left_alone(tmp_path):
    """Links under the name that a page is written by lead nowhere, and a link to a page is not replaced."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".page.html.s2d-partial").symlink_to(tmp_path / "precious")
    check_page(tmp_path / "page.html")
    assert (tmp_path / ".page.html.s2d-partial").is_symlink()
    write_page({}, tmp_path / "page.html")
    assert (tmp_path / "precious").read_text() == "mine" and not (
        tmp_path / "page.html"
    ).is_symlink()
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    with pytest.raises(ValueError, match="in the way"):
        check_page(tmp_path / "link.html")


def test_nothing_is_written_where_nothing_was_begun(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        traced(tmp_path / "page.html", Recorder(Hostile(), [1], {}, {})),
    ):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_half_a_page_is_never_there(tmp_path, monkeypatch, known):
    file, *_ = known("s2d", 0.0)
    before = file.read_bytes()
    monkeypatch.setattr(page, "as_script", lambda data: "\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        write_page({}, file)
    assert file.read_bytes() == before and len(list(file.parent.glob(".*"))) == 0


def test_a_draft_vocabulary_and_bfloat16_are_recorded_too(tokenizer, tmp_path):
    """Whatever a model is, every way of drafting: records are made, and say what was emitted."""
    for seed, (name, temperature) in enumerate(itertools.product(METHODS, (0.0, 0.7))):
        target, draft = (
            random_llama(
                s, eos_token_ids=(5,), exit_layers=(1, 2, 4), thresholds=(0.4, 0.6, 0.0)
            ).bfloat16()
            for s in (seed, seed + 1)
        )
        draft.keep_tokens(torch.arange(3, 40))
        options = options_of(name, draft, temperature=temperature, max_new_tokens=30, seed=seed)
        data, _, output = recorded(
            target, draft, Hostile(), [3, 1, 4], options, tmp_path / "page.html"
        )
        assert sum((step["tokens"] for step in data["steps"]), []) == output.tokens
