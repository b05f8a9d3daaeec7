"""Exit 0's tables: the same probabilities as by counting."""

import random
from collections import Counter

import pytest
from helpers import random_llama

from s2d.ngram.datastore import FOLLOWERS, Datastore
from s2d.ngram.table import ORDER, TableExit, Text, distribution
from s2d.tree import FixedShape, Tree


def documents_of(tokens, end):
    documents = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == end:
            documents.append([])
    return documents


def slow_distribution(text, others, context):
    """By counting in the ``text`` and in ``others``, documents, each time."""
    blend, left = Counter(), 1.0
    for n in range(min(ORDER, len(context)), 0, -1):
        for documents, doubts in (([text], Text.doubts), (others, Datastore.doubts)):
            counts = Counter()
            for tokens in documents:
                places = range(n, len(tokens))
                counts.update(tokens[i] for i in places if tokens[i - n : i] == context[-n:])
            whole = counts.total() + doubts[n - 1] * len(counts)
            for token, count in counts.items():
                blend[token] += left * count / whole
            if counts:
                left *= doubts[n - 1] * len(counts) / whole
    return blend


def random_tokens(rng, vocabulary, count):
    """Ids that are far from equally frequent. In a datastore, documents end with 0."""
    return [int(vocabulary * rng.random() ** 2) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_the_same_as_a_slow_version_while_the_text_grows(seed):
    rng = random.Random(seed)
    vocabulary, text = rng.choice((5, 20, FOLLOWERS)), []
    others = random_tokens(rng, vocabulary, rng.randrange(10000)) if seed else []
    tables = [Text(), Datastore(others, end=[0])] if others else [Text()]
    documents = documents_of(others, end=0)
    for _ in range(8):
        more = random_tokens(rng, vocabulary, rng.choice((1, 3, 300)))
        tables[0].grow(more)
        text += more
        start = rng.randrange(len(text))
        inside = (text + others)[start : start + rng.randrange(1, 7)]
        for context in (text, text[-2:], [], inside):
            expected = slow_distribution(text, documents, context)
            blend = distribution(tables, context)
            assert blend.keys() == expected.keys() and sum(blend.values()) < 1
            assert all(abs(blend[token] - expected[token]) < 1e-12 for token in blend)


def test_exit_0_predicts_full_rows():
    """What a row leaves to unknown tokens is divided among all alike."""
    exit_0 = TableExit(random_llama(0, vocab_size=9))
    context, text = [5, 6, 7, 5, 6, 7, 5, 6, 8, 5, 6], Text()
    text.grow(context)
    tree = Tree(context, FixedShape((3, 1)))
    known = distribution([text], context)
    left = (1.0 - sum(known.values())) / 9
    assert exit_0.predict(tree, [tree.root]).confidence == pytest.approx(max(known.values()) + left)
    tree.add_level([tree.root], [tree.root.child(token, 0.5, exit_layer=0) for token in (7, 1, 5)])
    rows = exit_0.predict(tree, tree.nodes[1:]).logits.exp()
    for row, token in zip(rows, (7, 1, 5), strict=True):
        known = distribution([text], [*context, token])  # after 1 there is nothing known
        left = (1.0 - sum(known.values())) / 9
        assert row.tolist() == pytest.approx([known.get(each, 0.0) + left for each in range(9)])


def test_a_datastore_keeps_the_most_frequent_followers_in_twenty_bytes_for_each_token():
    many = [t for i in range(2 * FOLLOWERS) for t in (1, 1000 + i)]
    twice = [t for i in range(FOLLOWERS) for t in (1, 1000 + 2 * i)]
    datastore = Datastore(many + twice, end=[0])
    assert datastore.followers((1,)) == {1000 + 2 * i: 2 for i in range(FOLLOWERS)}
    assert datastore.followers((1, 1002)) == {1: 2}
    assert sum(column.nbytes for column in datastore.columns) == 20 * len(many + twice)


def test_short_datastores_of_a_large_vocabulary():
    assert Datastore([0], end=[0]).followers((0,)) == Datastore([], end=[0]).followers((0,)) == {}
    datastore = Datastore([262143, 262142, 262143], end=[0])
    assert datastore.followers((262143,)) == {262142: 1}
