"""A worse draft with the right text: steps and exits of recorded float64 generations stay."""

import json

import pytest
from helpers import ROOT

from s2d import generate
from s2d.cli.program import parse_tree

RECORD = json.loads((ROOT / "tests" / "golden.json").read_text())


@pytest.mark.parametrize("target", RECORD)
def test_steps_and_exits_are_the_recorded_ones(target, mini, tokenizer):
    """golden.json: options, prompt, accept_lengths and exit_counts of each generation."""
    for record in RECORD[target]:
        options = dict(record["options"])
        if "tree" in options:
            options["tree"] = parse_tree(options["tree"])
        prompt = tokenizer.encode_chat([record["prompt"]])
        draft = None if options.get("exits") == [0] else mini("mini-draft")
        stats = generate(mini(target), prompt, draft, **options).stats
        assert stats.accept_lengths == record["accept_lengths"], record
        assert sorted(stats.sent.items()) == [tuple(pair) for pair in record["exit_counts"]]
