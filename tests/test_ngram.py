"""Exit 0's tables: the same probabilities as a slow version with dictionaries of tuples."""

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from s2d.extras.datastore import Datastore
from s2d.ngram import FOLLOWERS, ORDER, NGrams, Text


def slow_datastore(tokens, end):
    """{suffix: {follower: count}}."""
    documents = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == end:
            documents.append([])
    table = defaultdict(Counter)
    for document in documents:
        for i, token in enumerate(document):
            for n in range(1, min(ORDER, i) + 1):
                table[tuple(document[i - n : i])][token] += 1
    kept = {}
    for suffix, counts in table.items():
        best = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        kept[suffix] = dict(best[:FOLLOWERS])
    return kept


def slow_text(tokens, suffix):
    """{follower: count} of the tokens that followed the suffix last."""
    counts, latest = Counter(), []
    for i in range(len(suffix), len(tokens)):
        if tuple(tokens[i - len(suffix) : i]) == suffix:
            counts[tokens[i]] += 1
            latest = [token for token in latest if token != tokens[i]] + [tokens[i]]
            if len(latest) > FOLLOWERS:
                del counts[latest.pop(0)]
    return counts


def slow_distribution(text, datastore, context):
    blend, left = Counter(), 1.0
    for n in range(min(ORDER, len(context)), 0, -1):
        suffix = tuple(context[-n:])
        for doubt, counts in (
            (Text.doubts[n - 1], slow_text(text, suffix)),
            (Datastore.doubts[n - 1], datastore.get(suffix, {})),
        ):
            if counts:
                whole = sum(counts.values()) + doubt * len(counts)
                for token, count in counts.items():
                    blend[token] += left * count / whole
                left *= doubt * len(counts) / whole
    return blend


def random_tokens(rng, vocabulary, count):
    """Ids that are far from equally frequent, with repetitions, in documents that end with 0."""
    tokens = []
    while len(tokens) < count:
        if tokens and rng.random() < 0.05:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + rng.randrange(10)]
        tokens.append(int(vocabulary * rng.random() ** 2))
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_the_same_as_a_slow_version_while_the_text_grows(seed):
    rng = random.Random(seed)
    vocabulary = rng.choice((5, 20, 100, 300))
    others = random_tokens(rng, vocabulary, rng.randrange(10000)) if seed % 4 else []
    ngrams = NGrams(Datastore(others, end=0) if others else None)
    slow, text = slow_datastore(others, end=0), []
    for _ in range(8):
        more = random_tokens(rng, vocabulary, rng.choice((1, 3, 300)))
        ngrams.text.grow(more)
        text += more
        start = rng.randrange(len(text))
        inside = (text + others)[start : start + rng.randrange(1, 7)]
        for context in (text, text[-2:], [], inside):
            expected = slow_distribution(text, slow, context)
            blend = ngrams.distribution(context)
            assert blend.keys() == expected.keys() and sum(blend.values()) < 1
            assert all(abs(blend[token] - expected[token]) < 1e-12 for token in blend)


def test_a_suffix_with_many_followers_keeps_frequent_ones_in_a_datastore_and_late_ones_in_a_text():
    many = [t for i in range(2 * FOLLOWERS) for t in (1, 1000 + i)]
    twice = [t for i in range(FOLLOWERS) for t in (1, 1000 + 2 * i)]
    frequent = NGrams(Datastore(many + twice, end=0)).distribution([1])
    assert sorted(frequent) == [1000 + 2 * i for i in range(FOLLOWERS)]
    late = NGrams()
    late.text.grow(twice + many)
    assert sorted(late.distribution([1])) == [1000 + FOLLOWERS + i for i in range(FOLLOWERS)]


@pytest.mark.parametrize("tokens", [[], [0], [3], [0, 0], [262143, 262142, 262143]])
def test_short_datastores_of_any_vocabulary(tokens):
    ngrams = NGrams(Datastore(tokens, end=0))
    followers = {262143: [262142], 262142: [262143]} if len(tokens) == 3 else {}
    for token in (0, 3, 262142, 262143):
        assert list(ngrams.distribution([token])) == followers.get(token, [])


def test_a_datastore_takes_little_memory():
    """Three numbers of 32 bits per n-gram: about 20 bytes per token of text, at most 60."""
    tokens = (256000 * np.random.default_rng(0).random(100_000) ** 8).astype(np.int64)
    datastore = Datastore(tokens, end=0)
    arrays = datastore.token, datastore.count, datastore.first
    assert sum(array.nbytes for array in arrays) < 60 * len(tokens)
