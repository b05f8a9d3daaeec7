"""The first page is S2D: its texts and steps are those of the whole method."""

import re
import runpy

import pytest
from helpers import ROOT, nearly_equal, random_tokens

from s2d import generate, onepage


def ending(target, draft, prompt, thresholds=(0.6,), **options):
    """How the answer ends, which is the same by both."""
    options = dict(exits=(2, 3), draft_length=12, stop=0.35, max_new_tokens=20) | options
    expected = generate(target, prompt, draft, method="s2d", thresholds=thresholds, **options)
    steps = list(onepage.generate(target, prompt, draft, thresholds=(*thresholds, 0.0), **options))
    assert sum(steps, []) == expected.tokens
    assert list(map(len, steps)) == expected.stats.accept_lengths
    return expected.ended


def test_exits_that_lag_behind_and_ends():
    """EOS in a chain or last in the prompt; a limit, also of a single token."""
    ends = []
    for seed in range(2):
        models = nearly_equal(seed, eos_token_ids=(7, 20, 33))
        for options in (
            dict(exits=(1, 2, 4), thresholds=(0.4, 0.4), stop=0.0),
            dict(exits=(1, 2, 3, 4), thresholds=(0.5, 0.3, 0.5), stop=0.2, draft_length=5),
            dict(exits=(3,), thresholds=(), draft_length=1, max_new_tokens=seed + 1),
        ):
            prompt = random_tokens(seed, 1 + 5 * seed)
            ends += [ending(*models, [*prompt, *last], **options) for last in ([], [20])]
    assert {*ends} == {"eos", "length"}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_program_says_how_much_faster_it_was(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    runpy.run_module("s2d.onepage", run_name="__main__")
    answer, report = capsys.readouterr().out.splitlines()
    assert answer == "The capital of Tadastan is Vorbiburg."
    expected = r"The target's own text: (.*) tokens per step, (.*) times as fast as alone\."
    per_step, speed = map(float, re.fullmatch(expected, report).groups())
    assert per_step > 2 and speed > 0.5
