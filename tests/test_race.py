"""The animated picture says what was measured."""

import re
from xml.etree import ElementTree

import pytest
from browser import browse
from helpers import WEIGHTS

from s2d.checkpoint.pair import load_pair
from s2d.cli.colors import COLORS
from s2d.options import Options
from s2d.trace.page import style_of_colors
from s2d.trace.race import PROMPT, draw_race

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    """The picture, and the pair of models that is in it."""
    pair = load_pair(WEIGHTS / "mini-13b", options=Options(exits=(2, 3)))
    return draw_race(pair, rounds=1, tokens=24), pair


def texts_in(picture):
    """Of each answer the letters that appear, and their classes."""
    found = {}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        name = re.fullmatch(r"animation-name:(a\d)-\d+", group.get("style"))[1]
        for each in [*group.iter(f"{SVG}text")][:-1]:  # the last one is the count
            found.setdefault(name, []).append((each.text, each.get("class")))
    return found


def test_both_write_the_targets_text(drawn):
    picture, pair = drawn
    from s2d import generate

    prompt = pair.tokenizer.encode_chat([PROMPT])
    alone = generate(pair.target, prompt, method="ar", max_new_tokens=24)
    for letters in texts_in(picture).values():
        text = "".join(letter for letter, _ in letters)
        assert text == alone.text(pair.tokenizer)[: len(text)] and len(text) > 40
    assert f"the target alone in {alone.stats.steps} passes" in picture


def test_steps_appear_in_order_and_an_exit_has_one_colour_on_page_and_picture(drawn):
    picture = drawn[0]
    frames = re.findall(r"@keyframes (a\d)-(\d+){0%{opacity:0}([\d.]+)%{opacity:1}}", picture)
    for name in ("a0", "a1"):
        shares = [float(share) for each, _, share in frames if each == name]
        assert shares == sorted(shares) and 0 < shares[0] and shares[-1] < 100
    page = style_of_colors()
    dark = picture[picture.index("prefers-color-scheme:dark") :]
    for color in COLORS[:2]:
        assert f"--{color.name}:{color.light}" in picture and f"--{color.name}:{color.dark}" in dark
        assert f".{color.name} {{ color: light-dark({color.light}, {color.dark})" in page
    assert {kind for _, kind in texts_in(picture)["a1"]} <= {"teal", "orange", None}
    assert not re.search(r"<script|<animate|<set|foreignObject|href|url\(|@import", picture)


def test_with_reduced_motion_it_stands_still_at_its_end(drawn, tmp_path):
    file = tmp_path / "race.html"
    file.write_text(f"<!doctype html><title></title>{drawn[0]}", "utf-8")
    script = """return [all("g").map((each) => getComputedStyle(each).opacity),
      document.getAnimations().length]"""
    shown, running = browse(file, script, "--force-prefers-reduced-motion")
    assert {*shown} == {"1"} and running == 0
    assert browse(file, script)[1] == len(shown)
