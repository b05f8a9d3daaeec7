"""A page shows what happened: records against Steps, and pages in a headless browser."""

import functools
import json
import re
import shutil
import subprocess
from urllib.parse import unquote

import pytest
import torch
from helpers import need

from s2d.generate import generate, start
from s2d.sampling import Sampler
from s2d.trace import Recorder, check_page, traced
from s2d.tree import ancestor_mask

QUESTION = "Tell me a story about a robot called Nora and a clever old fisherman."
REJECTION = {"temperature": 1.0, "coupled": False}
ROOTS = {"method": "mcsd", "init": "target", "tree": (3, 2)}
CASES = {
    "ar": {"method": "ar", "temperature": 1.0},
    "chain": {"method": "s2d"},
    "chain by rejection": {"method": "sd", "exits": (3,)} | REJECTION,
    "tree by rejection": {"method": "mcsd", "tree": (3, 2, 1)} | REJECTION,
    "growing tree": {"method": "s2d-tree", "temperature": 1.0},
    "exit 0": {"method": "s2d-tree", "exits": (0,)},
    "exit 0 and layers": {"method": "s2d", "exits": (0, 3, 4)} | REJECTION,
    "roots": ROOTS | {"temperature": 1.0},
    "lossy roots": ROOTS | REJECTION,
}
CHROMIUM = "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic "
CHROMIUM += "--no-first-run --disable-background-networking --disable-component-update "
CHROMIUM += "--disable-sync --dump-dom"
close = functools.partial(pytest.approx, rel=1e-3, abs=1e-12)


def browse(file, script):
    """What ``script``, the body of a function, returns in a browser that has opened ``file``.

    There, ``all`` finds elements and ``texts`` their texts. Nothing on the page may go wrong.
    """
    need(shutil.which("chromium"), "Chromium", "chromium")
    watch = """<script>const wrong = []; onerror = (message) => wrong.push(message);
        document.addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
        const all = (selector, root = document) => [...root.querySelectorAll(selector)];
        const texts = (selector) => all(selector).map((each) => each.textContent);</script><title>"""
    report = f"""<script>{{ const result = (() => {{ {script} }})(), text = JSON.stringify([result, wrong]);
        document.documentElement.textContent = `@${{encodeURIComponent(text)}}@`; }}</script>"""
    page = file.with_name(f"{file.stem} watched.html")
    page.write_text(file.read_text("utf-8").replace("<title>", watch, 1) + report, "utf-8")
    command = [*CHROMIUM.split(), f"--user-data-dir={file.with_name('profile')}", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    result, wrong = json.loads(unquote(shown.split("@")[1]))
    assert wrong == []
    return result


@pytest.fixture(scope="module")
def known(mini, tokenizer, tmp_path_factory):
    """known("chain") -> (the page, its data, the Steps, the Generation) of a case."""

    @functools.cache
    def make(case, tokenizer=tokenizer):
        options = {"max_new_tokens": 40, "seed": 3} | CASES[case]
        draft = None if case == "ar" else mini("mini-draft")
        prompt = [3, *range(6)] if case == "hostile" else mini_prompt
        generation, steps = start(mini("mini-7b"), prompt, draft, **options), []
        file = tmp_path_factory.mktemp("pages") / "page.html"
        recorder = Recorder(tokenizer, prompt, {"target": "T", "draft": "D"}, generation)
        with traced(file, recorder):
            for step in generation:
                steps.append(step)
                recorder.add(step)
        return file, json.loads(json.dumps(recorder.data())), steps, generation

    mini_prompt = tokenizer.encode_chat([QUESTION])
    return make


@pytest.mark.parametrize("case", CASES)
def test_a_record_is_what_happened(case, known, mini, tokenizer):
    """All again, from the Steps; and nothing happens otherwise because it is recorded."""
    _, data, steps, generation = known(case)
    about, temperature = data["about"], CASES[case].get("temperature")
    draft = None if case == "ar" else mini("mini-draft")
    prompt, options = tokenizer.encode_chat([QUESTION]), CASES[case]
    plain = generate(mini("mini-7b"), prompt, draft, max_new_tokens=40, seed=3, **options)
    assert generation.tokens == plain.tokens
    assert "".join(data["answer"]) == tokenizer.decode(generation.tokens)
    rejected = 0
    for shown, step in zip(data["steps"], steps, strict=True):
        tree, path, nodes = step.tree, step.verdict.path, shown["nodes"]
        sent, tokens, parents = tree.sent, nodes["tokens"], nodes["parents"]
        assert (shown["n"], shown["path"], shown["tokens"]) == (step.n, path, step.tokens)
        assert tokens == [tree.tokens[node] for node in sent]
        assert [sent[i] if i >= 0 else -1 for i in parents] == [tree.parents[node] for node in sent]
        for node, exit, level in zip(sent, nodes["exits"], nodes["levels"], strict=True):
            assert exit == tree.exits[node]
            *below, last = shown["levels"].get(str(level), [[None, 1.0]])
            assert last[0] == exit
            for lower, confidence in below:
                assert confidence <= about["thresholds"][about["exits"].index(lower)]
        if case == "chain":  # of the likeliest tokens, whose probability is the confidence
            probs = [1.0, *nodes["probs"]]
            confidences = [tried[-1][1] for tried in shown["levels"].values()]
            assert confidences == close([b / a for a, b in zip(probs, probs[1:])])
        p = torch.softmax(step.logits / (temperature or 1.0), dim=-1)
        assert nodes["p"] == close([p[i + 1, token].item() for i, token in zip(parents, tokens)])
        walk = zip(shown["positions"], [-1, *path], [*path, None], strict=True)
        for n, (position, node, accepted) in enumerate(walk, step.n):
            row, ids = p[node + 1], position["ids"]
            columns = {(name, after): values for name, after, values in position["columns"]}
            bonus = [] if position["bonus"] is None else [position["bonus"]]
            assert bonus == (step.tokens[len(path) :] if accepted is None else [])
            assert row.argmax() in ids and columns["p", None] == close(row[ids].tolist())
            if case != "lossy roots" or node != -1:
                passed = [test["node"] for test in position["tests"] if test["accepted"]]
                assert passed == [accepted] * (accepted is not None)
            chosen = bonus if accepted is None else [tokens[accepted]]
            if ("e", None) in columns:
                e = Sampler(3, "cpu").noise([n], len(row))[0]
                assert columns["e", None] == close(e[ids].tolist())
                assert columns["p / e", None] == close((row / e)[ids].tolist())
                assert (row / e).argmax() in chosen or not chosen
            elif case != "lossy roots" and temperature is None:
                assert row.argmax() in chosen or not chosen
            if ("q", None) in columns:
                q = torch.cat(tree.q)[node + 1]
                rejected += check_tests(position, row, q, columns, tokens)
    assert (rejected > 0) == ("by rejection" in case or case == "exit 0 and layers")


def check_tests(position, p, q, columns, tokens):
    """The tests of one position by rows p and q (V,): how many of them reject."""
    ids, rejected = position["ids"], 0
    for test in position["tests"]:
        token = tokens[test["node"]]
        assert [test["p"], test["q"]] == close([p[token].item(), q[token].item()])
        ratio = (p[token] / q[token]).item()
        if abs(test["draw"] - ratio) > 1e-3:  # the number is recorded with four digits
            assert test["accepted"] == (test["draw"] < ratio)
        if not test["accepted"]:
            rejected += 1
            left, others = (p - q).relu(), q * (torch.arange(len(q)) != token)
            p, q = left / left.sum(), others / others.sum()
            assert columns["residual after", token] == close(p[ids].tolist())
            assert columns["q without", token] == close(q[ids].tolist())
    return rejected


ALL_STEPS = """
return Array.from({ length: Number(all("#slider")[0].max) + 1 }, (_, step) => {
  if (step) all("#next")[0].click();
  return {
    number: texts("#step-number")[0],
    words: texts("#step-words")[0],
    accepted: all("#tree g").map((each) => each.classList.contains("accepted")),
    mask: all("#mask g").map((row) => all(".cell", row).map((each) => +each.dataset.column)),
    levels: texts("#levels p"),
    positions: all("#positions button").map((_, i) => {
      all("#positions button")[i].click();
      const bars = all("#tests tr").slice(1).map((row) => all(".bar i", row));
      return [texts("#tests > p"), bars.map((row) => row.map((bar) => parseFloat(bar.style.width)))];
    }),
  };
});
"""


@pytest.mark.parametrize("case", CASES)
def test_the_page_shows_the_record(case, known, tokenizer):
    file, data, steps, generation = known(case)
    answer = "return [texts('#answer')[0], all('#answer span').map((each) => each.className)]"
    on_page = browse(file, ALL_STEPS)
    text, classes = browse(file, answer)
    assert text == tokenizer.decode(generation.tokens)
    exits = [None, *data["about"]["exits"]]
    sources = [exits.index(source) for step in data["steps"] for source in step["sources"]]
    assert [name.split()[0] for name in classes] == [f"source{source}" for source in sources]
    for number, (seen, shown, step) in enumerate(zip(on_page, data["steps"], steps, strict=True), 1):
        path, sent = step.verdict.path, step.tree.sent
        assert seen["number"] == f"{number} of {len(steps)}"
        assert f"{len(sent)} drafted" in seen["words"] and f"{len(path)} accepted" in seen["words"]
        kept = f"keeps {step.n + len(path)} of {step.n + len(sent)} positions"
        assert kept in seen["words"]
        assert seen["accepted"] == [node in path for node in range(len(sent))]
        mask = ancestor_mask(shown["nodes"]["parents"])
        assert seen["mask"] == [row.nonzero()[0].tolist() for row in mask]
        for line, (level, tried) in zip(seen["levels"], shown["levels"].items(), strict=True):
            numbers = re.findall(r"exit (\d+): ([\d.e-]+)", line)
            assert line.startswith(f"level {int(level) + 1}: ")
            expected = [(exit, pytest.approx(confidence, abs=6e-4)) for exit, confidence in tried]
            assert [(int(exit), float(confidence)) for exit, confidence in numbers] == expected
        for (lines, widths), position in zip(seen["positions"], shown["positions"], strict=True):
            results = ["accepted" if test["accepted"] else "rejected" for test in position["tests"]]
            bonus = [] if position["bonus"] is None else ["bonus"]
            assert len(lines) == len(results + bonus)
            assert all(result in line for result, line in zip(results + bonus, lines))
            columns = {name: values for name, _, values in position["columns"] if name != "e"}
            if "p / e" in columns:
                winner = max(columns["p / e"])
                columns["p / e"] = [each / winner for each in columns["p / e"]]
                assert not bonus or f"p / e = {winner:.3f}" in lines[-1]
            shares = [values for name, _, values in position["columns"] if name not in ("e", "p / e")]
            shares += [columns["p / e"]] if "p / e" in columns else []
            assert widths == [pytest.approx([100 * x for x in row], abs=0.006) for row in zip(*shares)]


def test_mouse_and_keyboard(known):
    file, data, steps, generation = known("tree by rejection")
    parents = data["steps"][1]["nodes"]["parents"]
    seen = browse(
        file,
        """
        const key = (key, shiftKey) => document.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey }));
        const lit = (selector) => all(selector).flatMap((each, i) => (each.classList.contains("lit") ? [i] : []));
        const seen = [], see = () => seen.push([parseInt(texts("#step-number")[0]), lit("#answer span")[0]]);
        see();
        key("ArrowRight"); see();
        key("ArrowRight", true); see();
        key("ArrowLeft", true); key("ArrowLeft", true); see();
        key("ArrowLeft"); key("ArrowLeft"); see();
        all("#answer span").at(-1).click(); see();
        key("ArrowRight", true); see();
        all("#previous")[0].click(); see();
        all("#slider")[0].value = 1; all("#slider")[0].dispatchEvent(new Event("input")); see();
        const last = all("#tree g").length - 1, nodes = ["#tree g", "#mask g"].map((group) => {
          all(group)[0].dispatchEvent(new Event("focus"));
          all(group)[last].dispatchEvent(new Event("mouseenter"));
          return [lit("#tree g"), lit("#mask g"), texts("#node")[0]];
        });
        return [seen, nodes];""",
    )
    first = [sum(len(step.tokens) for step in steps[:i]) for i in range(len(steps))]
    end, last = len(steps), len(generation.tokens) - 1
    moves = [(1, 0), (2, first[1]), (2, first[1] + 1), (1, first[1] - 1), (1, 0), (end, last)]
    moves += [(end, last), (end - 1, first[-2]), (2, first[1])]
    assert list(map(tuple, seen[0])) == moves
    above, up = [], len(parents) - 1
    while up >= 0:
        above, up = [up, *above], parents[up]
    for tree, mask, text in seen[1]:
        assert (tree, mask) == (above, above[-1:])
        assert f"Node {above[-1]} " in text and f"nodes {', '.join(map(str, above))}." in text


class Hostile:
    """A tokenizer whose every token is something to be careful with."""

    TEXTS = ("</script><script>hacked = 1</script>", "<img src=x onerror='hacked = 1'>", "\"'`&amp;")
    TEXTS += ("שלום", "👩‍🔬", "\n", "\u2028", "@@data@@", "${1}", "")

    def decode(self, ids):
        return "".join(self.TEXTS[token % len(self.TEXTS)] for token in ids)

    def encode(self, text):
        return [9]


def test_texts_are_shown_and_run_nothing(known):
    file, _, _, generation = known("growing tree", Hostile())
    script = "all('#answer span').forEach((each) => each.click());"
    script += "return [texts('#answer')[0], typeof hacked, document.images.length]"
    assert browse(file, script) == [Hostile().decode(generation.tokens), "undefined", 0]
    page = file.read_text("utf-8")
    assert "default-src 'none'" in page and not re.search(r"url\(|@import|innerHTML|fetch", page)


def test_it_is_readable_in_light_and_dark(known):
    """Text and its background differ by 4.5 to 1 at least (WCAG 2.2, 1.4.3), in every colour."""
    colors = """return ["light", "dark"].map((scheme) => {
        document.documentElement.style.colorScheme = scheme;
        all("#legend")[0].append(...[1, 2, 3, 4, 5, 6].map((i) => make("i", { class: `source${i}` })));
        const colors = all(".note, h2, #legend *").map((each) => getComputedStyle(each).color);
        return [getComputedStyle(document.body).backgroundColor, ...new Set(colors)]
          .map((color) => color.match(/[\\d.]+/g).map(Number)); })"""

    def luminance(color):
        parts = [x / 3294.6 if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in color]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for paper, *inks in browse(known("chain")[0], colors):
        assert len(inks) == 8
        for ink in inks:
            low, high = sorted((luminance(ink), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) > 4.5, ink


def test_why_drafting_ended(mini, tokenizer):
    prompt = tokenizer.encode_chat([QUESTION])
    for options, reasons in (
        ({"method": "sd", "draft_length": 3, "stop": 0.0}, {"last level", "must end"}),
        ({"method": "sd", "stop": 1.0}, {"likely enough to be followed", "must end"}),
        ({"method": "s2d", "exits": [0], "stop": 0.0}, {"nothing was known", "last level", "must end"}),
        ({"method": "ar"}, {"Nothing is drafted"}),
    ):
        generation = start(mini("mini-7b"), prompt, mini("mini-draft"), max_new_tokens=30, **options)
        recorder = Recorder(tokenizer, prompt, {}, generation)
        for step in generation:
            recorder.add(step)
        ends = {step["ended"] for step in recorder.steps}
        assert len(ends) == len(reasons) and all(any(r in end for end in ends) for r in reasons)


def test_an_interrupted_answer_has_its_page(mini, tokenizer, tmp_path):
    file = tmp_path / "page.html"
    for name in (tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(ValueError, match="name a file"):
            check_page(name)
    check_page(file)
    generation = start(mini("mini-7b"), [1, 2], method="ar")
    with pytest.raises(KeyboardInterrupt):
        with traced(file, Recorder(tokenizer, [1, 2], {}, generation)) as recorder:
            recorder.add(next(iter(generation)))
            raise KeyboardInterrupt
    assert '"steps":[{"n":2,' in file.read_text("utf-8") and list(tmp_path.iterdir()) == [file]
