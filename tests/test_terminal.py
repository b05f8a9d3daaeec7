"""Colours, conversations and many prompts, as a user at a terminal has them."""

import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from helpers import nearly_equal, random_llama

from s2d.cli import terminal
from s2d.cli.colors import COLORS
from s2d.cli.terminal import compare_speed, report, stream
from s2d.generation import generate, start
from s2d.tree import TARGET

QUESTION = "Tell me two things about Tadastan: its capital and its main export."


@pytest.mark.parametrize("exits", [(2, 3, 4), (0, 3)])
def test_every_token_has_the_colour_of_its_exit(exits, mini, tokenizer, monkeypatch, capsys):
    prompt = tokenizer.encode_chat([QUESTION])
    generation = start(mini("mini-7b"), prompt, mini("mini-draft"), exits=exits)
    monkeypatch.delenv("NO_COLOR", raising=False)
    # The draft's own exits come first, in its order.
    expected_colors = dict(zip((2, 3, *(set(exits) - {2, 3})), COLORS))
    models = {"target": mini("mini-7b"), "draft": mini("mini-draft")}
    pair = SimpleNamespace(tokenizer=tokenizer, options=generation.options, **models)
    steps, expected, ids = list(generation), [], []
    for step in steps:
        for exit, token in zip(step.sources, step.tokens):
            before, ids = tokenizer.decode(ids), [*ids, token]
            color = "" if exit == TARGET else str(expected_colors[exit].ansi)
            expected += [(color, letter) for letter in tokenizer.decode(ids)[len(before) :]]
    stream(steps, pair)
    assert "\033" not in capsys.readouterr().out
    for out in (sys.stdout, sys.stderr):
        monkeypatch.setattr(out, "isatty", lambda: True)
    stream(steps, pair)
    runs = re.findall(r"\033\[(\d+)m(.*?)\033\[0m|([^\033]+)", capsys.readouterr().out, re.DOTALL)
    found = [(color, letter) for color, text, plain in runs for letter in text + plain]
    assert found == [*expected, ("", "\n")]
    lines = report(generation.result(), pair)
    legend = re.findall(r"\033\[(\d+)mexit (\d)", lines)
    assert legend == [(str(expected_colors[exit].ansi), str(exit)) for exit in exits]


ROOTS = dict(method="mcsd", tree=(3, 2, 1), init="target")


@pytest.mark.parametrize("options", [dict(method="s2d"), dict(method="s2d-tree"), ROOTS])
def test_acceptance_is_what_the_steps_say(options):
    """Counted anew, one token after the other."""
    target, draft = nearly_equal(3)
    exits = {"exits": [1, 2, 4], "thresholds": [0.6, 0.5, 0.0], "max_new_tokens": 60}
    decoder = start(target, [1, 2, 3], draft, temperature=1.0, seed=4, **exits, **options)
    steps = [step for step in decoder if step.tree.depth]
    found = decoder.stats.acceptance()
    lengths = [len(step.accepted) for step in steps]
    assert len(steps) > 5 and sum(lengths) > 10
    accepted = found["num_accepted_tokens_per_pos"]
    for position, (sent, right) in enumerate(zip(found["num_drafts_per_pos"], accepted)):
        assert sent == sum(position + 1 in step.tree.depths for step in steps)
        assert right == sum(length > position for length in lengths)
    levels = Counter()  # that are sent, by the exit that drafted them
    for step in steps:
        levels.update(dict(zip(step.tree.depths, step.tree.exit_layers)).values())
    for layer, counts in found["per_exit"].items():
        drafted = right = 0
        for step in steps:
            drafted += step.tree.exit_layers.count(layer)
            right += sum(step.tree.exit_layers[node] == layer for node in step.accepted)
        asked = sum(levels[deeper] for deeper in (1, 2, 4) if deeper >= layer)
        assert [*counts.values()] == [asked, drafted, right]
    words = "4: asked for {} levels, drafted {} tokens, {} right"
    shown = words.format(*found["per_exit"][4].values())
    lines = report(decoder.result(), SimpleNamespace(target=target, draft=draft))
    assert shown in lines and lines.endswith(", lossless")


def test_the_comparison_takes_turns(monkeypatch):
    """The target makes a token per second, the method two."""
    turns = []

    def speed_of(generation):
        turns.append(generation.options.method)
        return 1.0 if generation.options.method == "ar" else 2.0

    monkeypatch.setattr(terminal, "speed_of", speed_of)
    target = random_llama(1, eos_token_ids=())
    answer = generate(target, [3, 1], target, max_new_tokens=80)
    line = compare_speed(SimpleNamespace(target=target, draft=target), [3, 1], answer)
    assert turns == ["ar", "s2d"] * 5
    turns = "(median of 5 runs of up to 20 tokens)"
    assert line.endswith(f"2.00 times as fast as the target alone {turns}")


def test_the_report_of_the_target_alone_names_no_shape():
    target = random_llama(1, eos_token_ids=())
    alone = generate(target, [3, 1], method="ar", max_new_tokens=2)
    last = report(alone, SimpleNamespace(target=target, draft=None)).splitlines()[-1]
    assert last == "method         ar, lossless"
