"""What may be asked of ``generate``: every refusal, and where defaults come from."""

import functools

import pytest
from helpers import raises_line, random_llama

from s2d import generate
from s2d.tree import Dynamic

NUMBERS = "whole numbers of at least 1"
SIZE = "is more than the target's context of 128"
BAD = [
    (dict(method="fast"), "unknown method 'fast'"),
    (dict(tokens=[]), "prompt is empty"),
    (dict(tokens=[1, 61]), "outside the target's vocabulary of 61"),
    (dict(tokens=[-1]), "outside the target's vocabulary"),
    (dict(tokens=[1] * 128), "context of 128 is full"),
    (dict(draft=None, exits=[1]), "without a draft be 0 alone, got \\[1\\]"),
    (dict(draft=random_llama(0, vocab_size=60)), "the draft has 60 tokens, the target 61"),
    (dict(max_new_tokens=0), "at least 1, got max_new_tokens=0"),
    (dict(draft_length=-1), "draft_length=-1"),
    (dict(method="ar", tree=(2, 2)), "method 'ar' drafts nothing"),
    (dict(tree=(2, 2)), "method 's2d' drafts no tree; use 'mcsd' or 's2d-tree'"),
    (dict(method="mcsd", draft_length=3), "drafts a tree; give its shape"),
    (dict(method="mcsd", tree=()), NUMBERS),
    (dict(method="mcsd", tree=(4, 0)), NUMBERS),
    (dict(method="s2d-tree", tree=Dynamic(0, 4, 60)), NUMBERS),
    (dict(method="s2d-tree", tree=Dynamic(62, 4, 60)), "different children: there are 61 tokens"),
    (dict(method="mcsd", tree=(62,)), "cannot have 62 different children"),
    (dict(method="mcsd", tree=(9, 9, 9)), f"a tree of 819 nodes, 3 deep, {SIZE}"),
    (dict(method="s2d-tree", tree=Dynamic(3, 400, 60)), f"400 deep, {SIZE}"),
    (dict(draft_length=400), f"400 nodes, 400 deep, {SIZE}"),
    (dict(draft_length=10**12), "a chain of 1000000000000 tokens is over 2048"),
    (dict(method="mcsd", exits=[2, 4]), "drafts from one exit"),
    (dict(temperature=float("nan")), "temperature must be 0 or at least"),
    (dict(temperature=1e-9), "temperature must be 0 or at least"),
    (dict(top_p=0.0), "top_p must be above 0"),
    (dict(top_p=1.5), "top_p must be above 0"),
    (dict(seed=-1), "seed must be a whole number"),
    (dict(stop=2.0), "stop is a probability"),
    (dict(init="both"), "init is 'draft' or 'target', got 'both'"),
    (dict(exits=[1, 5]), "lie within the draft's 4 layers"),
    (dict(exits=[-1, 4]), "lie within the draft's 4 layers"),
    (dict(exits=[3, 2]), "must increase"),
    (dict(exits=[]), "must increase"),
    (dict(exits=[2, 4], thresholds=[0.5]), "need as many thresholds, got 1"),
    (dict(exits=[2, 4], thresholds=[1.5, 0.0]), "within 0..1"),
    (dict(method="sd", exits=[2, 4]), "drafts from one exit"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(bad[0])[:60] for bad in BAD])
def test_what_cannot_be_run_is_refused_in_one_line(change, message):
    arguments = dict(tokens=[1, 2], draft=random_llama(9), method="s2d") | change
    raises_line(generate, ValueError, message, random_llama(9), **arguments)


def with_draft(**config):
    """A generation of 24 tokens with a draft that has this config."""
    models = random_llama(10), [1, 2], random_llama(10, **config)
    return functools.partial(generate, *models, max_new_tokens=24)


def test_exits_come_from_the_draft_unless_given():
    run = with_draft(exit_layers=(1, 3), thresholds=(0.0, 0.0))
    for options, used in (
        (dict(method="s2d"), 1),
        (dict(method="s2d", thresholds=[1.0, 0.0]), 3),
        (dict(method="s2d", exits=[2, 4], thresholds=[1.0, 0.0]), 4),
        (dict(method="sd"), 3),
        (dict(method="sd", exits=[2]), 2),
    ):
        assert set(run(**options).stats.exit_counts) == {used}


def test_shapes_come_from_the_draft_unless_given():
    run = functools.partial(with_draft(draft_length=3, draft_tree=(2, 5, 7)), exits=[4])
    for options, longest in (
        (dict(method="s2d"), 4),
        (dict(method="s2d", draft_length=5), 6),
        (dict(method="mcsd", tree=(2, 2)), 3),
    ):
        assert max(run(**options).stats.accept_lengths) == longest
    tree = run(method="s2d-tree").stats
    assert 7 * (tree.steps - 1) < tree.exit_counts[4] <= 7 * tree.steps


def test_chains_end_by_the_drafts_own_stop_unless_given():
    """A stop of 1 ends a chain at once; trees have none of their own; the text is the target's."""
    run = functools.partial(with_draft(draft_length=3, draft_stop=1.0), exits=[4])
    outputs = {name: run(method=name) for name in ("sd", "s2d", "mcsd", "s2d-tree")}
    outputs["never"] = run(method="s2d", stop=0)
    assert len({tuple(output.tokens) for output in outputs.values()}) == 1
    longest = {name: max(output.stats.accept_lengths) for name, output in outputs.items()}
    assert longest.pop("sd") == longest.pop("s2d") == 2 < min(longest.values())


@pytest.mark.parametrize("method", ["sd", "mcsd", "s2d", "s2d-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_after_which_the_draft_gives_up_is_counted(method, temperature):
    """No confidence of exit 0 is 1, so its table is asked once and nothing is proposed."""
    options = dict(stop=1.0, temperature=temperature, max_new_tokens=9)
    output = generate(random_llama(1), [3, 1], None, method, **options)
    assert output.stats.steps == len(output.tokens) and output.stats.draft_levels == 0
    assert output.stats.draft_forwards == len(output.tokens) - 1  # no draft before the last token
