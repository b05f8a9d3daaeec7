"""A page shows what happened: records against Steps, and pages in a headless browser."""

import functools
import importlib
import json
import math
import os
import re
import shutil
import subprocess
from operator import attrgetter
from urllib.parse import unquote

import pytest
import torch
from definition import logits_after
from helpers import WEIGHTS, program

import run
from s2d.draft import LayerExit
from s2d.generation import generate, start
from s2d.mcsd.decision import load_decision, with_decision
from s2d.mcsd.roots import RootsDecoder
from s2d.pair.settings import describe
from s2d.rules import SharedNoise
from s2d.sampling import Draws
from s2d.trace.colors import COLORS, color_exits
from s2d.trace.page import FOLDER, write_page
from s2d.trace.record import Recorder
from s2d.tree import TARGET

QUESTION = "Tell me a story about a robot called Nora and a clever old fisherman."
REJECTION = {"temperature": 1.0, "rule": "rejection"}
DECISION = load_decision(WEIGHTS / "mini-draft/decision-7b.safetensors")


class Own(SharedNoise):
    """A rule of a caller's own, of which the page says nothing but its name."""


class Sure(LayerExit):
    """An exit of a caller's own: its confidence is no number that JSON has."""

    def __init__(self, target, draft):
        super().__init__(draft, None, exit_layer=2)

    def predict(self, tree, nodes):
        return super().predict(tree, nodes)._replace(confidence=math.inf)


CASES = {
    "ar": {"method": "ar", "temperature": 1.0},
    "growing tree": {"method": "s2d-tree", "temperature": 1.0, "top_k": 4},
    "rejected growing tree": {"method": "s2d-tree", "drafter": with_decision(DECISION)} | REJECTION,
    "rejected chain of several exits": REJECTION,
    "rejected tree that ends": {"method": "mcsd", "tree": (3, 2, 1), "seed": 13}
    | {"temperature": 2.0, "rule": "rejection"},
    "rejected below lossy roots": {"method": "mcsd", "decoder": RootsDecoder} | REJECTION,
    "own": {"exits": (Sure, 3), "temperature": 1.0, "rule": Own},
}
close = functools.partial(pytest.approx, rel=6e-3, abs=1e-12)  # three digits


class Hostile:
    """A tokenizer whose every token is something to be careful with."""

    TEXTS = ["</script><script>hacked = 1</script>", "<img src=x onerror='hacked = 1'>", '"&amp;']
    special: dict = {}
    model = property(lambda self: self)
    TEXTS += ["שלום", "👩‍🔬", "\n", "\u2028", "@@data@@", "${1}", ""]

    def decode(self, ids):
        return "".join(self.TEXTS[token % len(self.TEXTS)] for token in ids)

    def encode(self, text):
        return [9]


@pytest.fixture(scope="module")
def known(mini, tokenizer, tmp_path_factory):
    """known("own") -> (the page, what is recorded in it, the Steps, the Decoder)."""

    @functools.cache
    def make(case):
        options = {"max_new_tokens": 40, "seed": 3} | CASES[case]
        generation = start(*models, **options)
        file = tmp_path_factory.mktemp("pages") / "page.html"
        texts = Hostile() if case == "own" else tokenizer
        names = {exit: color.name for exit, color in color_exits(generation.stats.exits).items()}
        recorder = Recorder(texts, generation, {"target": "T", "colors": names})
        steps = [recorder.add(step) or step for step in generation]
        write_page(recorder.data(), file)
        assert generation.tokens == generate(*models, **options).tokens
        return file, json.loads(json.dumps(recorder.data())), steps, generation

    models = mini("mini-7b"), tokenizer.encode_chat([QUESTION]), mini("mini-draft")
    return make


@pytest.mark.parametrize("case", CASES)
def test_a_record_is_what_happened(case, known):
    _, data, steps, decoder = known(case)
    options = decoder.options
    rejected = 0
    for shown, step in zip(data["steps"], steps, strict=True):
        tree = step.tree
        for node in tree.nodes:
            asked = shown["asked"].get(str(node.depth), [[TARGET, 1.0]])
            assert asked[-1][0] == node.exit_layer
        rows = options.distribution(step.logits)
        p = dict(zip(tree.nodes, rows))
        given = [p[node.parent][node.token].item() for node in tree.nodes[1:]]
        assert shown["nodes"]["p"][1:] == close(given)
        for position, node in zip(shown["positions"], [tree.root, *step.accepted], strict=True):
            ids, tests = position["ids"], position["tests"]
            columns = {name: values for name, _, values in position["columns"]}
            assert p[node].argmax() in ids
            assert columns["p"] == close(p[node][ids].tolist())
            tested = [tree.nodes[test["node"]] for test in tests]
            taken = [each.token for each, test in zip(tested, tests) if test["accepted"]]
            if position["bonus"] is not None:
                taken.append(position["bonus"])
            assert taken == step.tokens[node.depth : node.depth + 1]
            if "g" in columns:
                g = Draws(3).noise([len(tree.context) + node.depth], like=rows)[0]
                assert columns["g"] == close(g[ids].tolist())
                scores = [float(each) for each in columns["log p + g"]]  # also of "-inf"
                assert scores == close((p[node].log() + g)[ids].tolist())
            if "rejected" in case and tests and tested[0].exit_layer != TARGET:
                check_rejection(position, p[node], tested)
                rejected += not tests[0]["accepted"]
    assert ("g" in columns) == (case in ("ar", "growing tree"))
    assert (rejected > 0) == ("rejected" in case)


def check_rejection(position, p, tested):
    """The ``tested`` nodes were drawn from one q; or chosen, if they have none."""
    ids = position["ids"]
    expected = []
    q = tested[0].q
    if q is not None:
        expected.append(["q", None, close(q[ids].tolist())])
    for token, test in zip([node.token for node in tested], position["tests"]):
        if tested[0].q is None:
            q = torch.eye(len(p), dtype=p.dtype)[token]
        assert [test["p"], test.get("q", 1.0)] == close([p[token].item(), q[token].item()])
        assert test["chance"] == close(min(1.0, (p[token] / q[token]).item()))
        assert test["accepted"] == (test["draw"] < test["chance"])
        if not test["accepted"]:
            left = (p - q).relu()
            p = left / left.sum()
            others = q * (torch.arange(len(q)) != token)
            q = others / others.sum().clamp(min=1e-300)
            expected.append(["residual after", token, close(p[ids].tolist())])
    assert position["columns"][1:] == expected


def test_every_exit_that_was_asked_says_what_the_definition_says(known, mini):
    _, data, steps, _ = known("growing tree")
    tree = steps[2].tree
    for position, node in zip(data["steps"][2]["positions"], [tree.root, *steps[2].accepted]):
        for exit_layer, values in position["said"]:
            probs = logits_after(mini("mini-draft"), tree.text(node), exit_layer).softmax(dim=-1)
            assert values == close(probs[position["ids"]].tolist())


def test_the_page_names_functions_that_exist():
    template = (FOLDER / "page.html").read_text("utf-8")
    named = re.findall(r"<code>(\S+) in (s2d/\w+)\.py</code>", template)
    assert len(named) == template.count("<code>") > 0
    for function, file in named:
        module = importlib.import_module(file.replace("/", "."))
        assert callable(attrgetter(function)(module))


CHROMIUM = "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic"
CHROMIUM += " --no-first-run --disable-background-networking --disable-component-update --dump-dom"
NO_CHROMIUM = "there is no Chromium here: apt-get install chromium"
# Put before the page's own script.
BEFORE = """<script>
const wrong = [], all = (selector, root = document) => [...root.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((each) => each.textContent);
const lit = (selector) => all(selector).flatMap((each, i) => each.matches(".lit") ? [i] : []);
onerror = (message) => wrong.push(message);
document.onsecuritypolicyviolation = (event) => wrong.push(event.blockedURI);
</script><title>"""


def browse(file, script):
    """What ``script`` returns at the end of the page ``file``, on which nothing goes wrong."""
    if not shutil.which("chromium"):
        if os.environ.get("TEST_TOOLS") == "required":
            pytest.fail(NO_CHROMIUM, pytrace=False)
        pytest.skip(NO_CHROMIUM)
    page = file.with_name(f"{file.stem} watched.html")
    after = f"""<script>document.documentElement.textContent =
        "@" + encodeURIComponent(JSON.stringify([(() => {{{script}}})(), wrong])) + "@"</script>"""
    page.write_text(file.read_text("utf-8").replace("<title>", BEFORE, 1) + after, "utf-8")
    profile = f"--user-data-dir={file.with_name('profile')}"
    command = [*CHROMIUM.split(), profile, page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    result, wrong = json.loads(unquote(shown.split("@")[1]))
    assert wrong == []
    return result


ALL_STEPS = """const column = (head, i) => [head.textContent,
  all(`#tests td:nth-child(${i + 1})`).map((cell) => parseFloat(cell.textContent))];
const cells = (row) => all("td", row).map((each) => each.textContent);
return [texts("#answer"), all("#answer span").map((each) => each.className.split(" lit")[0]),
typeof hacked + document.images.length, texts("#options")[0],
Array.from({ length: Number(all("#slider")[0].max) + 1 }, (_, step) => {
  if (step) document.onkeydown(new KeyboardEvent("", { key: "ArrowRight" }));
  all("#mask g").at(-1).onfocus();
  return {
    accepted: all("#tree g").map((each) => each.matches(".accepted")),
    lit: lit("#tree g"),
    mask: all("#mask g").map((row) => all(".cell", row).map((each) => +each.dataset.column)),
    levels: all("#levels tr").slice(1).map(cells),
    positions: all("#positions button").map((button, i) => {
      all("#positions button")[i].click();
      return [texts("#lines > p"), all("#tests th").map(column).slice(1)];
    }),
  };
})]"""


# A browser is slow.
@pytest.mark.parametrize("case", ["growing tree", "rejected below lossy roots", "own"])
def test_the_page_shows_the_record(case, known, tokenizer):
    """Whatever is in the texts, which are no markup and no script. No option is forgotten."""
    file, data, steps, generation = known(case)
    answer, sources, harm, options, on_page = browse(file, ALL_STEPS)
    about = data["about"]
    texts = Hostile() if case == "own" else tokenizer
    assert answer == [texts.decode(generation.tokens)] and harm == "undefined0"
    values = describe(generation.options)
    given = {name for name in values if values[name] is not None}
    assert {each.split(": ")[0] for each in options.split(" · ")} == given
    rule = about["options"]["rule"]
    assert f" · rule: {rule}" in options
    colors = {int(exit): f"exit {name}" for exit, name in about["colors"].items()}
    given = [exit for step in data["steps"] for exit in step["sources"]]
    assert sources == [colors.get(exit, "target") for exit in given]
    for seen, step, made in zip(on_page, data["steps"], steps, strict=True):
        nodes = made.tree.nodes
        assert seen["accepted"] == [node in made.accepted for node in nodes]
        assert seen["mask"] == [[nodes.index(each) for each in node.path] for node in nodes]
        assert seen["lit"] == seen["mask"][-1]  # the node that is looked at, and its ancestors
        for level, asked in enumerate(step["asked"].values()):
            said = [row[level] for row in seen["levels"] if row[level] != "·"]
            assert [float(each) for each in said] == [float(confidence) for _, confidence in asked]
        for (lines, shown), position in zip(seen["positions"], step["positions"], strict=True):
            for test, line in zip(position["tests"], lines):
                assert line.endswith("accepted" if test["accepted"] else "rejected")
            check_table(shown, position, rule)


def check_table(shown, position, rule):
    """Every number is under its name, and what decides is named."""
    assert any("decides" in head for head, _ in shown) == (rule != "Own")
    columns = [[name, values] for name, _, values in position["columns"]]
    columns += [[f"exit {exit}", values] for exit, values in position["said"]]
    assert len(shown) == len(columns)
    for name, values in columns:
        values = [None if value == "-inf" else value for value in values]
        assert values in [numbers for head, numbers in shown if head.startswith(name)]


def test_the_page_of_run_py_names_the_models_and_colours_by_the_drafts_list(tmp_path):
    file = tmp_path / "page.html"
    line = ["--target", "7b", "--exits", "3", "--max-new-tokens", "4", "--trace", file]
    assert program(run.main, *line) == 0 and file.stat().st_size < 60_000
    script = "return [texts('#about')[0], texts('#tests th'), all('#legend span')"
    about, heads, classes = browse(file, f"{script}.map((each) => each.className)]")
    assert heads[1] == "p decides"
    assert about.startswith("target mini-7b · draft mini-draft · 4 tokens in ")
    assert classes == ["target", f"exit {COLORS[0].name}"]
