"""What the report says of an answer, and the comparison with the target alone."""

from collections import Counter
from types import SimpleNamespace

import pytest
from helpers import nearly_equal, random_llama

from s2d.cli import terminal
from s2d.cli.terminal import compare_speed, report
from s2d.generation import generate, start

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
    answer = generate(target, [3, 1], target, max_new_tokens=8)
    line = compare_speed(SimpleNamespace(target=target, draft=target), [3, 1], answer)
    assert turns == ["ar", "s2d"] * 5
    turns = "(median of 5 runs of up to 8 tokens)"
    assert line.endswith(f"2.00 times as fast as the target alone {turns}")
