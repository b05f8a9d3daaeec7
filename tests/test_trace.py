"""A page shows what happened: records against Steps, and pages in a headless browser."""

import functools
import json
import re

import pytest
import torch
from browser import browse
from helpers import ancestors_of, program

import run
from s2d.cli.colors import COLORS, color_exits
from s2d.definition import logits_after
from s2d.generation import generate, start
from s2d.rules import Greedy
from s2d.sampling import Noise
from s2d.trace.page import write_page
from s2d.trace.record import Recorder

QUESTION = "Tell me a story about a robot called Nora and a clever old fisherman."
REJECTION = {"temperature": 1.0, "rule": "rejection"}


class Careless(Greedy):
    """A rule of a caller's own."""

    exact = False


CASES = {
    "ar": {"method": "ar", "temperature": 1.0},
    "chain": {"method": "s2d"},
    "growing tree": {"method": "s2d-tree", "temperature": 1.0},
    "rejected growing tree": {"method": "s2d-tree"} | REJECTION,
    "rejected tree that ends": {"method": "mcsd", "tree": (3, 2, 1), "seed": 13}
    | {"temperature": 2.0, "rule": "rejection"},
    "lossy roots": {"method": "mcsd", "init": "target", "tree": (3, 2)} | REJECTION,
    "rejected chain below a root": {"init": "target", "exits": (0, 3, 4)} | REJECTION,
    "own rule": {"method": "s2d", "rule": Careless()},
}
close = functools.partial(pytest.approx, rel=6e-3, abs=1e-12)  # three digits


class Hostile:
    """A tokenizer whose every token is something to be careful with."""

    TEXTS = ["</script><script>hacked = 1</script>", "<img src=x onerror='hacked = 1'>", '"&amp;']
    special: dict = {}
    TEXTS += ["שלום", "👩‍🔬", "\n", "\u2028", "@@data@@", "${1}", ""]

    def decode(self, ids):
        return "".join(self.TEXTS[token % len(self.TEXTS)] for token in ids)

    def encode(self, text):
        return [9]


@pytest.fixture(scope="module")
def known(mini, tokenizer, tmp_path_factory):
    """known("chain") -> (the page, what is recorded in it, the Steps, the Decoder)."""

    @functools.cache
    def make(case):
        draft = None if case == "ar" else mini("mini-draft")
        options = {"max_new_tokens": 40, "seed": 3} | CASES[case]
        generation = start(mini("mini-7b"), prompt, draft, **options)
        file = tmp_path_factory.mktemp("pages") / "page.html"
        colors = color_exits(own=(2, 3, 4), used=generation.plan.exits)
        texts = Hostile() if case == "own rule" else tokenizer
        recorder = Recorder(texts, generation, {"target": "T"}, colors)
        steps = list(recorder.record())
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
        assert shown["n"] == len(tree.context) and shown["path"] == path
        assert nodes["tokens"] == tokens and nodes["parents"] == parents
        for node, level in enumerate(nodes["depths"]):
            *below, last = shown["asked"].get(str(level), [[None, 1.0]])
            assert last[0] == tree.exit_layers[node]
            for exit, confidence in below:
                assert confidence <= about["thresholds"][about["exits"].index(exit)]
        assert nodes["probs"] == close(tree.probs)
        p = torch.softmax(step.logits / (temperature or 1.0), dim=-1)
        drafted = list(zip(parents, tokens))[1:]
        assert nodes["p"][1:] == close([p[node, token].item() for node, token in drafted])
        walk = zip(shown["positions"], [0, *path], [*path, None], strict=True)
        for n, (position, node, accepted) in enumerate(walk, shown["n"]):
            row, ids, tests = p[node], position["ids"], position["tests"]
            columns = {(name, after): values for name, after, values in position["columns"]}
            assert row.argmax() in ids and columns["p", None] == close(row[ids].tolist())
            bonus = step.tokens[len(path) :] if accepted is None else []
            assert [position["bonus"]] == (bonus or [None])
            assert bool(position["note"]) == (accepted is None and not bonus)
            if case == "lossy roots":
                continue
            passed = [test["node"] for test in tests if test["accepted"]]
            assert passed == [accepted] * (accepted is not None)
            chosen = bonus if accepted is None else [tokens[accepted]]
            if not temperature:
                assert chosen in ([], [row.argmax()])
            elif about["rule"] == "SharedNoise":
                noise = Noise(generation.plan.asked.seed, len(row), "cpu", row.dtype).at([n])[0]
                assert columns["e", None] == close(noise[ids].tolist())
                assert columns["p / e", None] == close((row / noise)[ids].tolist())
                assert chosen in ([], [(row / noise).argmax()])
            elif about["rule"] == "Rejection" and tests and "chance" in tests[0]:
                check_rejection(position, row, tree.q.get(node), tokens)
                rejected += not tests[0]["accepted"]
    assert (rejected > 0) == ("rejected" in case)


def check_rejection(position, p, q, tokens):
    """``q`` is None if the tokens were chosen and not drawn."""
    drawn = q is not None
    ids, rest = position["ids"], iter(position["columns"][1 + drawn :])
    for test in position["tests"]:
        token = tokens[test["node"]]
        if not drawn:
            q = torch.eye(len(p), dtype=p.dtype)[token]
        assert [test["p"], test.get("q", 1.0)] == close([p[token].item(), q[token].item()])
        assert test["chance"] == close(min(1.0, (p[token] / q[token]).item()))
        assert test["accepted"] == (test["draw"] < test["chance"])
        if not test["accepted"]:
            left, others = (p - q).relu(), q * (torch.arange(len(q)) != token)
            p, q = left / left.sum(), others / others.sum().clamp(min=1e-300)
            assert next(rest) == ["residual after", token, close(p[ids].tolist())]
            # After the last test there is no other q.
            following = next(rest, None) if drawn else None
            assert following in (None, ["q without", token, close(q[ids].tolist())])


def test_every_exit_that_was_asked_says_what_the_definition_says(known, mini):
    """At every position."""
    _, data, steps, _ = known("growing tree")
    seen = []
    for shown, step in zip(data["steps"][:4], steps):
        for position, node in zip(shown["positions"], [0, *step.accepted], strict=True):
            text = step.tree.context + step.tree.path(node)
            for exit_layer, values in position["said"]:
                seen.append(exit_layer)
                probs = logits_after(mini("mini-draft"), text, exit_layer).softmax(dim=-1)
                assert values == close(probs[position["ids"]].tolist())
                assert probs.argmax() in position["ids"]
    assert 2 in seen


ALL_STEPS = """const cells = (row) => all("th, td", row).map((each) => each.textContent);
all(".lit, .chosen").forEach((each) => each.classList.remove("lit", "chosen"));
return [texts("#answer"), all("#answer span").map((each) => each.className),
typeof hacked + document.images.length,
Array.from({ length: Number(all("#slider")[0].max) + 1 }, (_, step) => {
  if (step) all("#next")[0].click();
  const opened = all("#positions button").findIndex((each) => each.ariaPressed === "true");
  return {
    opened, words: [...texts("#step-number"), ...texts("#step-words")].join(": "),
    accepted: all("#tree g").map((each) => each.matches(".accepted")),
    mask: all("#mask g").map((row) => all(".cell", row).map((each) => +each.dataset.column)),
    levels: all("#levels tr").map(cells),
    positions: all("#positions button").map((_, i) => {
      all("#positions button")[i].click();
      const widths = (row) => all(".bar i", row).map((bar) => parseFloat(bar.style.width));
      return [texts("#lines > p"), texts("#tests th"), all("#tests tr").slice(1).map(widths)];
    }),
  };
})]"""


# One for each rule; a browser is slow.
PAGES = ["chain", "growing tree", "rejected growing tree", "rejected tree that ends"]
PAGES += ["lossy roots", "own rule"]


@pytest.mark.parametrize("case", PAGES)
def test_the_page_shows_the_record(case, known, tokenizer):
    """Whatever is in the texts, which are no markup and no script."""
    file, data, _, generation = known(case)
    answer, sources, harm, on_page = browse(file, ALL_STEPS)
    about = data["about"]
    texts = Hostile() if case == "own rule" else tokenizer
    assert answer == [texts.decode(generation.tokens)] and harm == "undefined0"
    classes = {None: "target"}
    for exit, color in zip((2, 3, 4), COLORS):  # by the draft's own list, whichever are used
        classes[exit] = f"exit {color.name}"
    given = [exit for step in data["steps"] for exit in step["sources"]]
    assert sources == [classes[exit] for exit in given]
    for number, (seen, step) in enumerate(zip(on_page, data["steps"], strict=True), 1):
        path, parents = step["path"], step["nodes"]["parents"]
        words = f"{number} of .* {len(parents) - 1} drafted .* {len(path)} accepted\\. "
        assert re.match(words, seen["words"], re.DOTALL)
        assert seen["opened"] == len(path)  # the last position
        assert seen["accepted"] == [node in path for node in range(len(parents))]
        assert seen["mask"] == [row.nonzero()[0].tolist() for row in ancestors_of(parents)]
        levels = [dict(map(tuple, tried)) for tried in step["asked"].values()]
        for (name, *cells), exit in zip(seen["levels"][1:], about["exits"]):
            assert name.split()[1] == str(exit)
            assert cells == [f"{level[exit]:g}" if exit in level else "·" for level in levels]
        for said, position in zip(seen["positions"], step["positions"], strict=True):
            check_position(*said, position, about["rule"])


def check_position(lines, heads, widths, position, rule):
    results = ["accepted" if test["accepted"] else "rejected" for test in position["tests"]]
    results += ["bonus"] * (position["bonus"] is not None)
    results += [position["note"]] * (position["note"] != "")
    assert all(result in line for result, line in zip(results, lines, strict=True))
    exits = [(f"exit {exit}", values) for exit, values in position["said"]]
    columns = [(name, values) for name, _, values in position["columns"]]
    first = max(i for i, (name, _) in enumerate(columns) if name[0] in "pr")  # p / e, residual
    deciding, others = columns[first:], columns[:first]
    bars, names = [], ["token"]
    for name, values in [*deciding, *others[:1], *exits, *others[1:]]:
        names.append(name)
        if name == "p / e":
            values = [value / max(values) for value in values]
        if name != "e":
            bars.append(values)
    if rule in ("Greedy", "SharedNoise", "Rejection"):
        decides = [head.endswith(" decides") for head in heads[1:]]
        assert decides == [i < len(deciding) for i in range(len(names) - 1)]
    assert all(head.startswith(name) for head, name in zip(heads, names, strict=True))
    for row, values in zip(widths, zip(*bars), strict=True):
        assert row == pytest.approx([100 * value for value in values], abs=0.006)


MOVES = """const [slider] = all("#slider");
const chosen = () => all("#answer span").findIndex((each) => each.matches(".chosen"));
const at = () => [+slider.value, chosen(), lit("#answer span").length];
const key = (key, shiftKey) => document.onkeydown(new KeyboardEvent("", { key, shiftKey }));
const moves = [() => key("ArrowRight"), () => key("ArrowRight", true), () => key("ArrowLeft"),
  () => all("#answer span").at(-1).click(), () => slider.oninput((slider.value = 1))];
const nodes = () => ["onfocus", "onpointerenter", "onclick"].map((event) => {
  all("#tree g")[0].onfocus();
  all("#mask g").at(-1)[event]();
  return [lit("#tree g"), lit("#mask g"), texts("#node")[0]];
});
const play = () => {
  const [button] = all("#play"), seen = [];
  for (button.click(); button.textContent === "stop";) timers.at(-1)(), seen.push(+slider.value);
  return [...seen, button.textContent];
};
return [moves.map((move) => { move(); return at(); }), nodes(), play()]"""


def test_mouse_touch_and_keyboard(known):
    """A step opens at its last token, and all are lit. Play goes to the end and stops."""
    file, data, steps, generation = known("growing tree")
    seen, nodes, played = browse(file, MOVES)
    lengths = [len(step.tokens) for step in steps]
    second = [1, sum(lengths[:2]) - 1, lengths[1]]
    third = [2, sum(lengths[:2]), lengths[2]]
    end = [len(steps) - 1, len(generation.tokens) - 1, lengths[-1]]
    assert seen == [second, third, second, end, second]
    above = ancestors_of(data["steps"][1]["nodes"]["parents"])[-1].nonzero()[0].tolist()
    for in_tree, in_mask, text in nodes:
        assert in_tree == above and in_mask == above[-1:]
        assert f"nodes {', '.join(map(str, above[1:]))}." in text
    assert played == [*range(2, len(steps)), "play"]


def test_the_page_of_run_py_names_the_models_and_colours_by_the_drafts_list(tmp_path):
    file = tmp_path / "page.html"
    line = ["--target", "7b", "--exits", "3", "--max-new-tokens", "4", "--trace", file]
    assert program(run.main, *line) == 0 and file.stat().st_size < 60_000
    script = "return [texts('#about')[0], all('#legend span').map((each) => each.className)]"
    about, classes = browse(file, script)
    assert about.startswith("target mini-7b · draft mini-draft · method s2d · temperature 0 · ")
    assert classes == ["target", f"exit {COLORS[1].name}"]  # exit 3 is the second one
