"""The animated picture says what was measured, and the static pages open."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from browser import browse
from helpers import ROOT, program, refuses

from s2d.cli.colors import COLORS, color_exits
from s2d.generation import start
from s2d.trace import __main__ as trace
from s2d.trace.page import style_of_colors
from s2d.trace.race import HOLD, PROMPT, SECONDS, TOKENS, Answer, draw_race, moments_of

SHIPPED = ROOT / "s2d/trace/race.svg"
SVG = "{http://www.w3.org/2000/svg}"
ENDS = {"a0": [0.5, 1.25, 2.0, 2.5], "a1": [0.75, 1.0]}  # of the steps, in seconds
COLORED = color_exits(own=(2, 3), used=(2, 3))


@pytest.fixture(scope="module")
def drawn(tokenizer):
    """A picture of two short answers with given seconds, and their text."""
    ids = tokenizer.encode(
        "In a <busy> market & town there lived a lonely robot whose name was Nora"
    )

    def answer(title, ends, counts, sources):
        begins = [0.0, *ends]
        seconds = [end - begin for begin, end in zip(begins, ends)]
        steps, rest = [], list(ids[1:])
        for count, each in zip(counts, seconds):
            emitted = {"tokens": rest[:count], "sources": sources[:count]}
            steps.append(SimpleNamespace(seconds=each, **emitted))
            rest = rest[count:]
        return Answer(title, moments_of(steps, tokenizer))

    alone = answer("the target alone", ENDS["a0"], [5, 5, 5, 99], [None] * 99)
    s2d = answer("S2D", ENDS["a1"], [12, 99], [2, 3, 2, None] * 30)
    return draw_race([alone, s2d], COLORED, "a <machine>"), tokenizer.decode(ids)


def texts_in(picture):
    """Of each answer the text that appears, and the exits' classes of each letter."""
    found = {}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        name = re.fullmatch(r"animation-name:(a\d)-\d+", group.get("style"))[1]
        for each in group.iter(f"{SVG}text"):
            if each.get("class") != "faint":  # the counts
                found.setdefault(name, []).append((each.text, each.get("class")))
    return found


def test_tokens_appear_when_they_were_measured_but_slower(drawn):
    picture, text = drawn
    factor = SECONDS / 2.5  # of the slower answer
    factor, period = round(factor), round(factor) * 2.5 + HOLD
    frames = re.findall(r"@keyframes (a\d)-(\d+){0%{opacity:0}([\d.]+)%{opacity:1}}", picture)
    expected = [
        (name, str(step), f"{100 * end * factor / period:.2f}")
        for name, ends in ENDS.items()
        for step, end in enumerate(ends, start=1)
    ]
    assert frames == expected
    assert f"g{{animation:{period:.2f}s step-end infinite}}" in picture
    assert f"{factor} times slower than measured (a &lt;machine&gt;)" in picture
    for runs in texts_in(picture).values():
        assert "".join(text for text, _ in runs) == text
    assert "2 passes and 1000 ms." in re.search("<title>(.*)</title>", picture)[1]


def test_an_exit_has_one_colour_on_page_terminal_and_picture(drawn):
    """By the draft's list: what is used does not matter."""
    assert color_exits(own=(2, 3), used=(3,)) == {3: COLORED[3]}
    picture, page = drawn[0], style_of_colors()
    dark = picture[picture.index("prefers-color-scheme:dark") :]
    for color in (COLORED[2], COLORED[3]):
        assert f"--{color.name}:{color.light}" in picture and f"--{color.name}:{color.dark}" in dark
        assert f".{color.name} {{ color: light-dark({color.light}, {color.dark})" in page
    classes = {kind for _, kind in texts_in(picture)["a1"]}
    assert classes == {"exit teal", "exit orange", None}
    assert len({color.ansi for color in COLORS}) == len({color.name for color in COLORS}) == 6


AT_TIMES = """const svg = all("svg")[0];
return [all("g").map((each) => getComputedStyle(each).opacity), document.getAnimations().length,
  TIMES.map((time) => {
    for (const each of document.getAnimations()) { each.pause(); each.currentTime = time; }
    return all("g").map((each) => +getComputedStyle(each).opacity);
  })]"""


def test_what_the_picture_shows_in_a_browser(drawn, tmp_path):
    """Each moment; and with reduced motion the last frame, standing still."""
    file = tmp_path / "race.html"
    file.write_text(f"<!doctype html><title></title>{drawn[0]}", "utf-8")
    ends = [end for ends in ENDS.values() for end in ends]
    factor = round(SECONDS / 2.5)
    times = [0, *(1000 * (end * factor + shift) for end in ends for shift in (-0.05, 0.05))]
    script = AT_TIMES.replace("TIMES", str(times))
    _, running, seen = browse(file, script)
    assert running == len(ends)
    for time, shown in zip(times, seen):
        assert shown == [int(time / 1000 > end * factor) for end in ends]
    still, running, _ = browse(file, script, "--force-prefers-reduced-motion")
    assert still == ["1"] * len(ends) and running == 0


def test_the_shipped_picture(mini, tokenizer):
    """What the models write, by style sheets alone; its words are those of the README."""
    picture = SHIPPED.read_text("utf-8")
    assert len(picture) < 100_000
    assert not re.search(r"<script|<animate|<set|foreignObject|href|url\(|@import", picture)
    assert re.search(r"\d times slower than measured \(.+, \d+ threads?, float32\)", picture)
    prompt = tokenizer.encode_chat([PROMPT])
    for name, method in (("a0", "ar"), ("a1", "s2d")):
        draft = None if method == "ar" else mini("mini-draft")
        decoder = start(mini("mini-13b"), prompt, draft, method, max_new_tokens=TOKENS)
        steps = list(decoder)
        shown = "".join(text for text, _ in texts_in(picture)[name])
        assert shown == tokenizer.decode(decoder.tokens)
        assert len(re.findall(f"@keyframes {name}-", picture)) == len(steps)
    [title] = re.findall("<title>(.*)</title>", picture)
    assert f"![{title}](race.svg)" in (ROOT / "s2d/trace/README.md").read_text()


def test_pages_for_a_web_server(tmp_path, capsys):
    folder = tmp_path / "site"
    assert program(trace.main, "pages", "--out", folder) == 0
    assert capsys.readouterr().err.startswith(f"wrote {folder}")
    refuses(trace.main, capsys, "is there already", "pages", "--out", folder)
    index = (folder / "index.html").read_text("utf-8")
    names = re.findall(r'(?:href|src)="([^"]+)"', index)
    pages = ["chain.html", "sorted.html", "tree.html"]
    assert names == ["race.svg", *pages]
    assert sorted(path.name for path in folder.iterdir()) == sorted(["index.html", *names])
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
    [title] = re.findall("<title>(.*)</title>", SHIPPED.read_text("utf-8"))
    assert f'<img src="race.svg" alt="{title}">' in index
    lines = re.findall("<li>(.*)</li>", index)
    assert [re.search(r'href="(.*)"', line)[1] for line in lines] == pages
    counts = re.search(r"\d+ tokens in \d+ steps", lines[-1])[0]
    assert counts in browse(folder / pages[-1], "return texts('#about')[0]")


def test_the_picture_is_measured(tmp_path):
    """By the command that made the one that is shipped."""
    file = tmp_path / "race.svg"
    assert program(trace.main, "race", "--out", file, "--rounds", 1) == 0
    shown, shipped = (texts_in(each.read_text("utf-8")) for each in (file, SHIPPED))
    for name in ("a0", "a1"):
        assert "".join(text for text, _ in shown[name]) == "".join(
            text for text, _ in shipped[name]
        )
