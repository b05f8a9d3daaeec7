"""The animated picture says what was measured."""

import re
from xml.etree import ElementTree

from s2d import generate
from s2d.pair.loading import load_pair
from s2d.trace.race import PROMPT, draw_race, name_processor

SVG = "{http://www.w3.org/2000/svg}"


def test_both_write_the_targets_text_in_the_time_that_was_measured():
    """In the first frame all groups are there; then they appear anew, one after another."""
    pair = load_pair("13b")
    picture = draw_race(pair, rounds=1, tokens=24)
    prompt = pair.tokenizer.encode_chat([PROMPT])
    alone = generate(pair.target, prompt, method="ar", max_new_tokens=24)
    texts = {"a0": "", "a1": ""}
    groups = list(ElementTree.fromstring(picture).iter(f"{SVG}g"))
    for group in groups:
        name = re.match(r"animation-name:(a\d)", group.get("style"))[1]
        *letters, _ = group.iter(f"{SVG}text")  # the last one is the count
        texts[name] += "".join(each.text for each in letters)
    expected = alone.text(pair.tokenizer).replace(" ", "")  # ends of lines have none
    for text in texts.values():
        assert expected.startswith(text.replace(" ", "")) and len(text) > 30
    frame = r"@keyframes (a\d)-\d+{0%{opacity:1}[\d.]+%{opacity:0}([\d.]+)%{opacity:1}}"
    frames = re.findall(frame, picture)
    times = [float(time) for name, time in frames if name == "a0"]  # of the target alone
    assert times == sorted(times) and times[-1] == 100.0 and len(frames) == len(groups)
    title = ElementTree.fromstring(picture).find(f"{SVG}title").text
    assert f"the target alone in {alone.stats.steps} passes" in title
    assert name_processor() in picture and len(name_processor()) > 5
