"""A page shows what happened: records against Steps, and pages in a headless browser."""

import functools
import json
import re
import shutil
import subprocess
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
import torch
from helpers import need, program

import run
from s2d.generation import generate, start
from s2d.mask import ancestor_mask
from s2d.sampling import Noise
from s2d.trace.page import write_page
from s2d.trace.record import Asked, Recorder, why_ended
from s2d.tree import FixedShape, Tree

QUESTION = "Tell me a story about a robot called Nora and a clever old fisherman."
REJECTION = {"temperature": 1.0, "rule": "rejection"}
CASES = {
    "ar": {"method": "ar", "temperature": 1.0},
    "chain": {"method": "s2d"},
    "growing tree": {"method": "s2d-tree", "temperature": 1.0},
    "rejected chain": {"method": "s2d", "exits": (0, 3, 4)} | REJECTION,
    "rejected tree": {"method": "mcsd", "tree": (3, 2, 1)} | REJECTION,
    "rejected tree that ends": {"method": "mcsd", "tree": (6, 5, 2, 2), "temperature": 2.0}
    | {"rule": "rejection", "seed": 8},
    "lossy roots": {"method": "mcsd", "init": "target", "tree": (3, 2)} | REJECTION,
}
CHROMIUM = "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic"
CHROMIUM += " --no-first-run --disable-background-networking --disable-component-update --dump-dom"
BEFORE = """<script>
const wrong = [], all = (selector, root = document) => [...root.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((each) => each.textContent);
const lit = (selector) => all(selector).flatMap((each, i) => each.matches(".lit") ? [i] : []);
onerror = (message) => wrong.push(message);
document.onsecuritypolicyviolation = (event) => wrong.push(event.blockedURI);
</script><title>"""
close = functools.partial(pytest.approx, rel=1e-3, abs=1e-12)


def browse(file, script):
    need(shutil.which("chromium"), "Chromium", "chromium")
    page = file.with_name(f"{file.stem} watched.html")
    after = f"""<script>document.documentElement.textContent =
        "@" + encodeURIComponent(JSON.stringify([(() => {{{script}}})(), wrong])) + "@"</script>"""
    page.write_text(file.read_text("utf-8").replace("<title>", BEFORE, 1) + after, "utf-8")
    command = [*CHROMIUM.split(), f"--user-data-dir={file.with_name('profile')}", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    result, wrong = json.loads(unquote(shown.split("@")[1]))
    assert wrong == []
    return result


@pytest.fixture(scope="module")
def known(mini, tokenizer, tmp_path_factory):
    """known("chain") -> (the page, what is recorded in it, the Steps, the Decoder)."""

    @functools.cache
    def make(case, tokenizer=tokenizer):
        draft = None if case == "ar" else mini("mini-draft")
        options = {"max_new_tokens": 40, "seed": 3} | CASES[case]
        generation = start(mini("mini-7b"), prompt, draft, **options)
        file, steps = tmp_path_factory.mktemp("pages") / "page.html", []
        recorder = Recorder(tokenizer, prompt, {"target": "T"}, generation)
        steps.extend(recorder.record(generation))
        write_page(recorder.data(), file)
        assert generation.tokens == generate(mini("mini-7b"), prompt, draft, **options).tokens
        return file, json.loads(json.dumps(recorder.data())), steps, generation

    prompt = tokenizer.encode_chat([QUESTION])
    return make


@pytest.mark.parametrize("case", CASES)
def test_a_record_is_what_happened(case, known):
    _, data, steps, generation = known(case)
    about, temperature, rejected = data["about"], CASES[case].get("temperature"), 0
    for shown, step in zip(data["steps"], steps, strict=True):
        tree, path, nodes = step.tree, step.accepted, shown["nodes"]
        tokens, parents = tree.tokens, tree.parents
        assert [shown["n"], shown["path"]] == [len(tree.context), path]
        assert [nodes["tokens"], nodes["parents"]] == [tokens, parents]
        for node, level in enumerate(nodes["levels"]):
            *below, last = shown["levels"].get(str(level), [[None, 1.0]])
            assert last[0] == tree.exit_layers[node]
            for exit, confidence in below:
                assert confidence <= about["thresholds"][about["exits"].index(exit)]
        if case == "chain":  # of the likeliest tokens, whose probability is the confidence
            sure = [tried[-1][1] for tried in shown["levels"].values()]
            assert nodes["probs"] == close(torch.tensor(sure).cumprod(dim=0).tolist())
        p = torch.softmax(step.logits / (temperature or 1.0), dim=-1)
        assert nodes["p"] == close([p[i + 1, token].item() for i, token in zip(parents, tokens)])
        walk = zip(shown["positions"], [-1, *path], [*path, None], strict=True)
        for n, (position, node, accepted) in enumerate(walk, shown["n"]):
            row, ids, tests = p[node + 1], position["ids"], position["tests"]
            columns = {(name, after): values for name, after, values in position["columns"]}
            assert row.argmax() in ids and columns["p", None] == close(row[ids].tolist())
            bonus = step.tokens[len(path) :] if accepted is None else []
            assert [position["bonus"]] == (bonus or [None])
            if case == "lossy roots":
                continue
            passed = [test["node"] for test in tests if test["accepted"]]
            assert passed == [accepted] * (accepted is not None)
            chosen = bonus if accepted is None else [tokens[accepted]]
            if not temperature:
                assert chosen in ([], [row.argmax()])
            elif about["rule"] == "SharedNoise":
                noise = Noise(generation.settings.seed, len(row), "cpu", row.dtype).at([n])[0]
                assert columns["e", None] == close(noise[ids].tolist())
                assert columns["p / e", None] == close((row / noise)[ids].tolist())
                assert chosen in ([], [(row / noise).argmax()])
            elif tests:
                check_rejection(position, row, tree.q[node], tokens)
                rejected += not tests[0]["accepted"]
    assert (rejected > 0) == ("rejected" in case)


def check_rejection(position, p, q, tokens):
    ids, rest = position["ids"], iter(position["columns"][2:])
    for test in position["tests"]:
        token = tokens[test["node"]]
        assert [test["p"], test["q"]] == close([p[token].item(), q[token].item()])
        assert test["accepted"] == (test["draw"] < test["p"] / test["q"])
        if not test["accepted"]:
            left, others = (p - q).relu(), q * (torch.arange(len(q)) != token)
            p, q = left / left.sum(), others / others.sum().clamp(min=1e-300)
            assert next(rest) == ["residual after", token, close(p[ids].tolist())]
            following = next(rest, None)  # after the last test there is no other q
            assert following in (None, ["q without", token, close(q[ids].tolist())])


ALL_STEPS = """return [texts("#answer"), all("#answer span").map((each) => each.className[6]),
Array.from({ length: Number(all("#slider")[0].max) + 1 }, (_, step) => {
  if (step) all("#next")[0].click();
  return {
    words: [...texts("#step-number"), ...texts("#step-words")].join(": "),
    accepted: all("#tree g").map((each) => each.matches(".accepted")),
    mask: all("#mask g").map((row) => all(".cell", row).map((each) => +each.dataset.column)),
    levels: texts("#levels p"),
    positions: all("#positions button").map((_, i) => {
      all("#positions button")[i].click();
      const widths = (row) => all(".bar i", row).map((bar) => parseFloat(bar.style.width));
      return [texts("#tests > p"), all("#tests tr").slice(1).map(widths)];
    }),
  };
})]"""


@pytest.mark.parametrize("case", CASES)
def test_the_page_shows_the_record(case, known, tokenizer):
    file, data, _, generation = known(case)
    answer, sources, on_page = browse(file, ALL_STEPS)
    assert answer == [tokenizer.decode(generation.tokens)]
    exits = [None, *data["about"]["exits"]]
    given = [exit for step in data["steps"] for exit in step["sources"]]
    assert [exits[int(source)] for source in sources] == given
    for number, (seen, step) in enumerate(zip(on_page, data["steps"], strict=True), 1):
        path, parents = step["path"], step["nodes"]["parents"]
        words = f"{number} of .* {len(parents)} drafted .* {len(path)} accepted\\. "
        assert re.match(words, seen["words"], re.DOTALL)
        assert seen["accepted"] == [node in path for node in range(len(parents))]
        assert seen["mask"] == [row.nonzero()[0].tolist() for row in ancestor_mask(parents)]
        for line, (level, tried) in zip(seen["levels"], step["levels"].items(), strict=True):
            numbers = re.findall(r"(?:level|exit|:) (\d[\d.e-]*)", line)
            expected = [int(level) + 1, *(number for pair in tried for number in pair)]
            assert list(map(float, numbers)) == pytest.approx(expected, rel=0.05, abs=6e-4)
        for (lines, widths), position in zip(seen["positions"], step["positions"], strict=True):
            results = ["accepted" if test["accepted"] else "rejected" for test in position["tests"]]
            results += ["bonus"] * (position["bonus"] is not None)
            assert all(result in line for result, line in zip(results, lines, strict=True))
            names = [name for name, *_ in position["columns"]]
            bars = [values for name, _, values in position["columns"] if name != "e"]
            if results and "q" not in names:  # p of the first token
                p = float(re.search(r" p = (\d[\d.e-]*\d)", lines[0])[1])
                assert p == pytest.approx(bars[0][0], rel=0.05, abs=6e-4)
            if "p / e" in names:
                bars[-1] = [ratio / max(bars[-1]) for ratio in bars[-1]]
            rows = [[100 * share for share in row] for row in zip(*bars)]
            assert widths == [pytest.approx(row, abs=0.006) for row in rows]


MOVES = """const [slider] = all("#slider"), at = () => [+slider.value, lit("#answer span")[0]];
const key = (key, shiftKey) => document.onkeydown(new KeyboardEvent("", { key, shiftKey }));
const moves = [() => key("ArrowRight"), () => key("ArrowRight", true), () => key("ArrowLeft"),
  () => key("ArrowLeft"), () => all("#answer span").at(-1).click(), () => key("ArrowRight", true),
  () => slider.oninput((slider.value = 1)), () => key("ArrowLeft", true)];
const nodes = () => ["#tree g", "#mask g"].map((group) => {
  all(group)[0].onfocus();
  all(group).at(-1).onmouseenter();
  return [lit("#tree g"), lit("#mask g"), texts("#node")[0]];
});
return [moves.map((move) => { move(); return at(); }), nodes()]"""


def test_mouse_and_keyboard(known):
    file, data, steps, generation = known("rejected tree")
    seen, nodes = browse(file, MOVES)
    first = [sum(len(step.tokens) for step in steps[:i]) for i in range(len(steps))]
    end = [len(steps) - 1, len(generation.tokens) - 1]
    moves = [[1, first[1]], [1, first[1] + 1], [0, 0], [0, 0], end, end]
    assert seen == [*moves, [1, first[1]], [0, first[1] - 1]]
    above = ancestor_mask(data["steps"][0]["nodes"]["parents"])[-1].nonzero()[0].tolist()
    for *found, text in nodes:
        assert found == [above, above[-1:]] and f"nodes {', '.join(map(str, above))}." in text


class Hostile:
    """A tokenizer whose every token is something to be careful with."""

    TEXTS = ["</script><script>hacked = 1</script>", "<img src=x onerror='hacked = 1'>", '"&amp;']
    model = SimpleNamespace(is_open=lambda ids: False)
    TEXTS += ["שלום", "👩‍🔬", "\n", "\u2028", "@@data@@", "${1}", ""]

    def decode(self, ids):
        return "".join(self.TEXTS[token % len(self.TEXTS)] for token in ids)

    def encode(self, text):
        return [9]


def test_texts_are_shown_and_nothing_is_run(known):
    file, _, _, generation = known("growing tree", Hostile())
    script = "return [texts('#answer')[0], typeof hacked, document.images.length]"
    assert browse(file, script) == [Hostile().decode(generation.tokens), "undefined", 0]


def test_why_drafting_ended():
    chain = FixedShape((1, 1))
    for reason, tree, prob, levels in (
        ("answer or the context", Tree([1], chain, max_levels=1), 1.0, [0]),
        ("nothing was known", Tree([1], chain, max_levels=2), 1.0, [0, 1]),
        ("no path was likely", Tree([1], chain, max_levels=2, stop=0.5), 0.4, [0]),
    ):
        tree.add_level([[7]], [[prob]], exit_layer=2)
        assert reason in why_ended(tree, [Asked(level, 2, prob) for level in levels])


def test_the_page_of_run_py_names_the_models(tmp_path):
    file = tmp_path / "page.html"
    assert program(run.main, "--target", "7b", "--max-new-tokens", "4", "--trace", file) == 0
    about = browse(file, "return texts('#about')[0]")
    assert about.startswith("target mini-7b · draft mini-draft · method s2d · temperature 0 · ")
