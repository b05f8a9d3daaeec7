"""What may be asked of ``generate``: every refusal, and where defaults come from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import TINY, raises_line, random_llama

from s2d import decode, generate
from s2d.draft import NoDraft
from s2d.generate import LEAST, TABLE_ALONE, TABLE_THRESHOLD, Options, start
from s2d.sampling import Sampler, Sampling
from s2d.tree import Dynamic, KConfig

SIZE = "is more than the target's context of 128"
NO_NUMBERS = {  # argument -> values that are out of bounds, or no numbers of its kind
    "tokens": ([], [1, 61], [-1], [5.7], [True], torch.tensor([[1, 2]]), np.array([1.0]), 7),
    "max_new_tokens": (0, 2.5),
    "draft_length": (-1, 2.5, 10**12),
    "temperature": (float("nan"), 1e-9, False, 10**400),
    **{"top_p": (0.0, 1.5), "top_k": (-1, 2.0), "seed": (-1, 1.5), "stop": (2.0, "0.5", abs)},
    "exits": ([1, 5], [-1, 4], 2, [2.0], []),
    "thresholds": ([1.5, 0.0], 0.5),
    "tree": ((), KConfig((2, 1)), (4, 0), Dynamic(0, 4, 60), Dynamic(2, 4.0, 60)),
}
SAID = {  # of some the whole message
    "seed": "seed: expected a whole number from 0 to 9223372036854775807, got ",
    "top_p": "top_p: expected a number from 1e-40 to 1, got ",
    "tokens": "prompt's ids: expected a (whole number from 0 to 60|list with at least one), got ",
    "exits": "exits of 4 draft layers: expected a (whole number from 0 to 4|list .*), got ",
}
METHOD = {"tree": {"method": "s2d-tree"}, "thresholds": {"exits": [2, 4]}}
BAD = [
    (dict(method="fast"), "unknown method 'fast'"),
    (dict(tokens=[1] * 128), "context of 128 is full"),
    (dict(draft=None, exits=[1]), "exits of 0 draft layers: .* from 0 to 0, got 1"),
    (dict(draft=random_llama(0, vocab_size=60)), "the draft has 60 tokens, the target 61"),
    (dict(method="ar", tree=(2, 2)), "method ar does not use tree; leave it out, or use mcsd or"),
    (dict(method="ar", replacement=True), "method ar does not use replacement"),
    (dict(method="ar", init="target"), "method ar does not use init"),
    (dict(method="sd", thresholds=[0.0]), "method sd does not use thresholds"),
    (dict(method="mcsd", thresholds=[0.0]), "does not use thresholds; leave it out, or use s2d or"),
    (dict(replacement=True), "method s2d does not use replacement"),
    (dict(method="s2d-tree", replacement=True), "replacement is for siblings"),
    (dict(method="mcsd", replacement=True, coupled=True), "is for tokens that are tested; with"),
    (dict(tree=(2, 2)), "method s2d does not use tree; leave it out, or use mcsd or s2d-tree"),
    (dict(method="mcsd", draft_length=3), "method mcsd does not use draft_length"),
    (dict(method="s2d-tree", tree=Dynamic(62, 4, 60)), "different children: there are 61 tokens"),
    (dict(method="mcsd", tree=(62,)), "cannot have 62 different children"),
    (dict(method="mcsd", tree=(9, 9, 9)), f"a tree of 819 nodes, 3 deep, {SIZE}"),
    (dict(method="s2d-tree", tree=Dynamic(3, 400, 60)), f"400 deep, {SIZE}"),
    (dict(draft_length=400), f"400 nodes, 400 deep, {SIZE}"),
    (dict(method="mcsd", exits=[2, 4]), "drafts from one exit"),
    (dict(method="sd", exits=[2, 4]), "drafts from one exit"),
    (dict(init="both"), "init is 'draft' or 'target': 'both'"),
    (dict(exits=[3, 2]), "must increase"),
    (dict(exits=[2, 4], thresholds=[0.5]), "need as many thresholds, got \\(0.5,\\)"),
]


def refused(message, **change):
    arguments = dict(tokens=[1, 2], draft=random_llama(9), method="s2d") | change
    raises_line(generate, ValueError, message, random_llama(9), **arguments)


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(bad[0])[:60] for bad in BAD])
def test_what_cannot_be_run_is_refused_in_one_line(change, message):
    refused(message, **change)


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_of_its_kind_is_refused_in_one_line(name):
    for value in NO_NUMBERS[name]:
        refused(SAID.get(name, f"{name}.*: .*, got "), **{name: value}, **METHOD.get(name, {}))


def test_decode_refuses_what_it_cannot_continue():
    target, sampling = random_llama(9), Sampling(0.0, 1.0, False, Sampler(0, "cpu"))
    for tokens, limit, message in (
        ([], 9, "expected a list with at least one"),
        ([1, -1], 9, "prompt's ids: expected a whole number from 0 to 60, got -1"),
        ([1], 129, "limit: expected a whole number from 1 to 128, got 129"),
    ):
        models = target, tokens, NoDraft(target.device)
        raises_line(decode, ValueError, message, *models, sampling, limit)


IDS_OF_KINDS = (1, 2), range(1, 3), torch.tensor([1, 2]), np.array([1, 2]), [*np.int32([1, 2])]


@pytest.mark.parametrize("ids", IDS_OF_KINDS, ids=lambda ids: type(ids).__name__)
def test_numbers_of_numpy_and_torch_are_taken(ids):
    plain = dict(max_new_tokens=9, temperature=1.5, top_p=0.5, top_k=20, seed=3, draft_length=2)
    plain |= dict(exits=[1, 2], thresholds=[0.5, 0.0], stop=0.25)
    given = {name: np.array(value)[()] for name, value in plain.items()}
    models = random_llama(9), ids, random_llama(10)
    found = generate(*models, **given).tokens
    assert found == generate(models[0], [1, 2], models[2], **plain).tokens
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize("method", ["ar", "s2d", "s2d-tree"])
def test_an_answer_says_why_it_ended(method):
    """At EOS, which goes first; at the length that was asked for; where the context is full."""
    last = generate(random_llama(3), [1] * 120, method="ar", max_new_tokens=8).tokens[-1]
    for length, eos, why in ((30, (), "context"), (8, (), "length"), (8, (last,), "eos")):
        options = dict(draft=random_llama(4), method=method, max_new_tokens=length)
        generation = start(random_llama(3, eos_token_ids=eos), [1] * 120, **options)
        said = [generation.ended, *(generation.ended for _ in generation)]
        assert said[-1] == why and set(said[:-1]) == {""}


OWN = dict(exit_layers=(1, 3), thresholds=(0.7, 0.1), draft_length=2, draft_stop=0.4)
OWN |= dict(draft_tree=(2, 5, 7))
SHORT, BUSH, GROWING = KConfig((1, 1)), KConfig((4, 2, 2, 1)), Dynamic(2, 5, 7)
ALONE = Dynamic(*TABLE_ALONE.draft_tree)
PLANS = [  # options -> exits, thresholds, shape, stop: the draft's own, unless others are given
    (dict(), (1, 3), (0.7, 0.0), SHORT, 0.4),
    (dict(thresholds=[1.0, 0.0], draft_length=3), (1, 3), (1.0, 0.0), KConfig((1, 1, 1)), 0.4),
    (dict(exits=[2, 4], stop=0), (2, 4), (0.5, 0.0), SHORT, 0.0),  # these have no thresholds
    (dict(exits=[0, 1, 3]), (0, 1, 3), (TABLE_THRESHOLD, 0.7, 0.0), SHORT, 0.4),
    (dict(method="sd"), (3,), (0.0,), SHORT, 0.4),
    (dict(method="sd", exits=[2]), (2,), (0.0,), SHORT, 0.4),
    (dict(method="mcsd"), (3,), (0.0,), BUSH, 0.0),  # trees have no stop of their own
    (dict(method="mcsd", tree=(2, 2)), (3,), (0.0,), KConfig((2, 2)), 0.0),
    (dict(method="s2d-tree"), (1, 3), (0.7, 0.0), GROWING, 0.0),
    (dict(method="s2d-tree", tree=(2, 2), stop=0.3), (1, 3), (0.7, 0.0), KConfig((2, 2)), 0.3),
    (dict(method="s2d-tree", exits=[0]), (0,), (0.0,), ALONE, LEAST),  # exit 0 alone has its own
    (dict(method="s2d", exits=[0], draft_length=2), (0,), (0.0,), SHORT, LEAST),
]


@pytest.mark.parametrize(("given", "exits", "thresholds", "shape", "stop"), PLANS, ids=str)
def test_what_is_not_given_comes_from_the_draft(given, exits, thresholds, shape, stop):
    plan = Options(**{"method": "s2d"} | given).plan(TINY, replace(TINY, **OWN))
    assert (plan.exits, plan.thresholds, plan.shape, plan.stop) == (exits, thresholds, shape, stop)
    if exits == (0,):
        assert Options(**{"method": "s2d"} | given).plan(TINY).stop == LEAST > 0


@pytest.mark.parametrize("method", ["sd", "mcsd", "s2d", "s2d-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_after_which_the_draft_gives_up_is_counted(method, temperature):
    """No confidence of exit 0 is 1, so its table is asked once and nothing is proposed."""
    options = dict(stop=1.0, temperature=temperature, max_new_tokens=9)
    output = generate(random_llama(1), [3, 1], None, method, **options)
    assert output.stats.steps == len(output.tokens) and output.stats.draft_levels == 0
    assert output.stats.draft_forwards == len(output.tokens) - 1  # no draft before the last token
