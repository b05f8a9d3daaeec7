"""What the report says of an answer, and the comparison with the target alone."""

import json
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import nearly_equal, random_llama

from s2d.cli import terminal
from s2d.cli.terminal import compare_speed, gap_in_steps, report
from s2d.generation import decide, generate, start
from s2d.mcsd.roots import RootsDecoder
from s2d.pair import settings
from s2d.proof import checked
from s2d.sampling import Draws
from s2d.tree import GrowingShape

ROOTS = dict(method="mcsd", tree=(3, 2, 1), decoder=RootsDecoder)


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
        depths = [{node.depth for node in step.tree.nodes} for step in steps]
        assert sent == sum(position + 1 in each for each in depths)
        assert right == sum(length > position for length in lengths)
    levels = Counter()  # that are sent, by the exit that drafted them
    for step in steps:
        levels.update({node.depth: node.exit_layer for node in step.tree.nodes}.values())
    for layer, counts in found["per_exit"].items():
        drafted = right = 0
        for step in steps:
            drafted += sum(node.exit_layer == layer for node in step.tree.nodes)
            right += sum(node.exit_layer == layer for node in step.accepted)
        asked = sum(levels[deeper] for deeper in (1, 2, 4) if deeper >= layer)
        assert [*counts.values()] == [asked, drafted, right]
    words = "4: asked {} times, drafted {} tokens, {} right"
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_how_near_two_tokens_were_is_said_in_steps_of_the_dtype(temperature):
    """4.0625 and 4.125 are two steps of bfloat16 apart; noise that decides as well is added."""
    target = random_llama(1)
    logits = torch.zeros(61, dtype=torch.bfloat16)
    logits[5], logits[9] = 4.0625, 4.125
    model = Mock(return_value=logits[None, None], device="cpu", dtype=torch.bfloat16)
    found = gap_in_steps(model, decide(target, temperature=temperature), 3, [1, 2], (5, 9))
    noise = Draws(3).noise([2], like=torch.zeros(1, 61, dtype=torch.float64))[0]
    apart = 0.0625 + temperature * (noise[9] - noise[5])
    assert found == pytest.approx(abs(float(apart)) / 0.03125)


def test_parts_that_hold_other_values_are_told_apart_in_json():
    def make(value):
        return lambda *given: value

    class Own:
        def __init__(self, value):
            self.value = value

    parts = [make(1), make(2), lambda *given: 2, partial(make, 1), partial(make, value=1)]

    class Slots:
        __slots__ = ()

    def unfinished():
        def function():
            return later

        yield function
        later = 1

    parts += [partial(make, torch.zeros(2)), partial(make, torch.ones(2)), Own, Own(1), Own(2)]
    parts += [lambda *given, value=3: value, Slots(), next(unfinished())]
    parts += [GrowingShape(3, 3, 6), checked(GrowingShape(3, 3, 6))]
    found = [json.dumps(each, default=settings.plain) for each in parts]
    assert len({*found}) == len(parts) and "0x" not in "".join(found)
    assert settings.plain(make(1)) == settings.plain(make(1))
