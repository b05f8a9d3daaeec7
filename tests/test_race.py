"""The animated picture says what was measured."""

import re
from xml.etree import ElementTree

import pytest
from browser import browse

from s2d import generate
from s2d.pair.loading import load_pair
from s2d.trace.race import PROMPT, draw_race, name_processor

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    """The picture, and the pair of models that is in it."""
    pair = load_pair("13b")
    return draw_race(pair, rounds=1, tokens=24), pair


def test_both_write_the_targets_text_in_the_time_that_was_measured(drawn):
    picture, pair = drawn
    prompt = pair.tokenizer.encode_chat([PROMPT])
    alone = generate(pair.target, prompt, method="ar", max_new_tokens=24)
    texts = {"a0": "", "a1": ""}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        name = re.match(r"animation-name:(a\d)", group.get("style"))[1]
        *letters, _ = group.iter(f"{SVG}text")  # the last one is the count
        texts[name] += "".join(each.text for each in letters)
    expected = alone.text(pair.tokenizer).replace(" ", "")  # ends of lines have none
    for text in texts.values():
        assert expected.startswith(text.replace(" ", "")) and len(text) > 30
    times = re.findall(r"@keyframes a0-\d+{.*{opacity:0}([\d.]+)%", picture)
    times = [float(each) for each in times]  # when a step of the target appears
    assert times == sorted(times) and times[-1] == 100.0
    title = ElementTree.fromstring(picture).find(f"{SVG}title").text
    assert f"the target alone in {alone.stats.steps} passes" in title
    assert name_processor() in picture and len(name_processor()) > 5


def test_the_first_frame_is_complete_and_then_all_begins_anew(drawn, tmp_path):
    file = tmp_path / "race.html"
    file.write_text(f"<!doctype html><title></title>{drawn[0]}", "utf-8")
    script = """const moving = document.getAnimations();
      const look = (time) => (moving.forEach((each) => { each.pause(); each.currentTime = time; }),
        all("g").filter((each) => getComputedStyle(each).opacity === "1").length);
      return [all("g").length, moving.length, look(0), look(3900), look(4020)]"""
    groups, running, first, held, cleared = browse(file, script)
    assert running == first == held == groups > 20 and cleared == 0
