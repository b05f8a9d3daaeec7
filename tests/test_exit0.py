"""Exit 0 in the loop: a table that grows between steps is exact, alone and in front of layers."""

import itertools

import pytest
from enumeration import assert_lossless
from helpers import path_of, random_llama, random_tokens

from s2d import generate
from s2d.extras.datastore import Datastore
from s2d.generate import start
from s2d.ngram import NGrams, top
from s2d.tree import Dynamic

SIZES = dict(vocab_size=3, num_hidden_layers=2, scale=0.15, eos_token_ids=())
ALONE = [
    dict(method="sd", draft_length=2),
    dict(method="s2d", draft_length=3, stop=0.4),
    dict(method="mcsd", tree=(2, 1)),
    dict(method="mcsd", tree=(2,), replacement=True),
    dict(method="s2d-tree", tree=Dynamic(2, 2, 3), stop=0.0),
    dict(method="s2d-tree", tree=Dynamic(3, 3, 4)),
    dict(method="sd", draft_length=2, init="target"),
    dict(method="s2d-tree", tree=Dynamic(1, 2, 2), init="target"),
]
IN_FRONT = [
    dict(method="s2d", draft_length=2),
    dict(method="s2d-tree", tree=(2, 1)),
    dict(method="s2d-tree", tree=Dynamic(2, 2, 3)),
]
WRITTEN = [0, 1, 2, 0, 1, 1, 2, 2, 0, 1, 0]


@pytest.mark.parametrize("setting", ALONE + IN_FRONT, ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_every_outcome_together_is_the_targets_distribution(setting, stored):
    """All steps of three tokens, while the table learns what was accepted."""
    target, draft = random_llama(7, **SIZES), random_llama(11, **SIZES)
    enough = 0.6 if stored else 0.42  # for exit 0, so that layers are used too
    options = dict(exits=[0, 1, 2], thresholds=[enough, 0.5, 0.0], draft=draft)
    options = {"stop": 0.05} | setting | (options if setting in IN_FRONT else {})
    options["datastore"] = Datastore(WRITTEN, end=2) if stored else None
    prompt, length = [0, 1, 0, 1, 1], 2 if "init" in setting else 3
    _, seen = assert_lossless(target, prompt, length, temperature=1.0, **options)
    used = {exit_layer for step in seen for exit_layer in step.proposal.exits}
    assert 0 in used and (setting in ALONE or used & {1, 2})


@pytest.mark.parametrize("stored", [False, True])
def test_greedy_text_is_the_targets_whatever_is_combined(stored):
    """Long enough to repeat itself; EOS and the end of the context too."""
    options = dict(eos_token_ids=(5,), scale=0.1, max_position_embeddings=90)
    target, draft = random_llama(0, **options), random_llama(0, **options)
    alone = generate(target, [3, 1, 4], method="ar", max_new_tokens=200)
    store = Datastore([*alone.tokens[:40], 5, 9, 9, 9], end=5) if stored else None
    shapes = [dict(method="sd"), dict(method="s2d"), dict(method="mcsd", tree=(2, 2, 1))]
    shapes += [dict(method="s2d-tree"), dict(method="s2d-tree", tree=Dynamic(3, 5, 11))]
    shapes += [dict(method="s2d-tree", tree=Dynamic(2, 4, 40))]  # more nodes than layers would run
    stops, lengths = (None, 0.05), (1, 30, 200)
    for shape, stop, length in itertools.product(shapes, stops, lengths):
        ways = [{}, {"init": "target"}, {"exits": [0], "draft": draft}]
        if shape["method"].startswith("s2d"):
            ways += [{"exits": [0, 2, 4], "draft": draft}]
        for way in ways:
            setting = shape | way | dict(stop=stop, max_new_tokens=length, datastore=store)
            output = generate(target, [3, 1, 4], **setting)
            if output.exact:
                assert output.tokens == alone.tokens[:length], setting
            assert sum(output.stats.accept_lengths) == len(output.tokens)
    assert {0} == set(generate(target, [3, 1, 4], datastore=store).stats.exit_counts)


def test_a_tree_holds_the_most_probable_paths():
    """Against all paths of the table, listed here; nodes by level, none below the stop."""
    target = random_llama(3, eos_token_ids=(), scale=0.1)
    prompt = random_tokens(1, 60, vocab=6)
    shape, stop = Dynamic(4, 3, 7), 0.03
    step = next(iter(start(target, prompt, method="s2d-tree", tree=shape, stop=stop)))
    ngrams = NGrams()
    ngrams.text.grow(prompt)
    paths, level = {}, {(): 1.0}
    for _ in range(shape.depth):
        level = {
            (*path, token): probability * more
            for path, probability in level.items()
            for token, more in top(ngrams.distribution([*prompt, *path][-4:]), shape.top_k)
        }
        paths |= level
    best = sorted(paths, key=paths.get, reverse=True)[: shape.size]
    tokens, parents = step.proposal.tree.tokens, step.proposal.tree.parents.tolist()
    found = [(*tokens[path_of(parents, node)].tolist(),) for node in range(len(parents))]
    assert sorted(found) == sorted(path for path in best if paths[path] >= stop)
    assert [len(path) for path in found] == sorted(len(path) for path in found)
    assert step.proposal.depth == max(map(len, found))


def test_fixed_trees_are_filled_with_other_tokens():
    """Of 0 9 3 9 the table knows one token; siblings still differ, known ones first."""
    options = dict(method="mcsd", tree=(4,), exits=[0], stop=0.0)
    for temperature in (0.0, 1.0):
        step = next(iter(start(random_llama(3), [0, 9, 3, 9], temperature=temperature, **options)))
        first, *others = step.proposal.tree.tokens.tolist()
        assert first == 3 and len({first, *others}) == 4


def test_a_datastore_of_another_vocabulary_or_that_nothing_reads_is_refused():
    target, only = random_llama(3), "a datastore is for exit 0, not for"
    for largest, message, how in (
        (100, "the datastore has token 100, the target has 61", {}),
        (10, only, dict(draft=target, exits=[2, 4])),
        (10, only, dict(draft=target)),
        (10, "ar does not use datastore", dict(method="ar")),
    ):
        with pytest.raises(ValueError, match=message):
            generate(target, [5, 6], datastore=Datastore([6, largest, 0], end=0), **how)


def test_what_the_table_does_not_know_costs_nothing():
    """A text without a repetition: no node is sent, and no uncertain one."""
    target = random_llama(3, eos_token_ids=())
    for method in ("sd", "s2d-tree"):
        steps = list(start(target, [1, 2, 3], method=method, max_new_tokens=1))
        assert [len(step.proposal.tree) for step in steps] == [0]
