"""Exit 0: which tokens followed the last few tokens before, in this text and in others (n-grams).

Knows nothing about models or trees. A context is a list of token ids.

There are two tables. A ``Text`` grows with every accepted token, a ``Datastore`` is fixed. For a
suffix of the context, each gives the tokens that followed it and how often each one did.
``NGrams`` blends these counts into one distribution, from the longest suffix to the shortest. Of
the probability that is left, a table takes c / (c + doubt · u), where the suffix was seen c times
and u different tokens followed (Witten–Bell smoothing; Chen & Goodman 1999). So a suffix that one
token often followed, and no other, takes nearly all, and one that anything may follow takes little.
What is left at the end belongs to no known token. Therefore the largest probability says how sure
the exit is.
"""

from bisect import bisect_left

import numpy as np

ORDER = 4  # tokens in the longest suffix
FOLLOWERS = 64  # different tokens that a table keeps for one suffix; this bounds the time
# By the suffix's length. Counts of this text say more than others; a lone token's say the least.
DOUBTS_TEXT, DOUBTS_DATASTORE = (4.0, 2.0, 1.0, 0.7), (3.0, 3.0, 3.0, 3.0)


class Text:
    """The n-grams of the text itself.

    A suffix keeps the ``FOLLOWERS`` different tokens that followed it last.
    """

    doubts = DOUBTS_TEXT

    def __init__(self):
        self.table = {}  # a suffix as a tuple -> {follower: count}, the latest follower last
        self.newest = ()

    def grow(self, tokens):
        """Append tokens to the text."""
        for token in tokens:
            for start in range(len(self.newest)):
                counts = self.table.setdefault(self.newest[start:], {})
                counts[token] = counts.pop(token, 0) + 1
                if len(counts) > FOLLOWERS:
                    del counts[next(iter(counts))]
            self.newest = (*self.newest, token)[-ORDER:]

    def followers(self, suffix):
        """The tokens that followed, and the count of each; neither where the suffix is new."""
        counts = self.table.get(tuple(suffix), {})
        return counts.keys(), counts.values()


class Datastore:
    """The n-grams of a fixed list of tokens: a trie whose nodes are numbered level by level.

    Every node is a different n-gram. Its children, the tokens that followed it, are neighbours in
    ascending order, so that a step down the trie is one binary search. The three arrays take about
    20 bytes a token of English text. A suffix keeps its ``FOLLOWERS`` most frequent followers.

    tokens: ids (N,), of any vocabulary, each at least 0
    end: the id that ends a document; no n-gram goes on behind it
    """

    doubts = DOUBTS_DATASTORE

    def __init__(self, tokens, end):
        tokens = np.asarray(tokens, dtype=np.int32)
        self.largest = int(tokens.max(initial=0))
        windows = [tokens]  # row n: the token n after each one; -1 behind the end of its document
        for _ in range(ORDER):
            following = np.append(windows[-1][1:], np.int32(-1))
            windows.append(np.where(tokens == end, np.int32(-1), following))
        windows = np.stack(windows)[:, np.lexsort(windows[::-1])]  # (ORDER + 1, N), one n-gram each
        node = np.zeros(len(tokens), dtype=np.int64)  # where each window stands: at the root
        levels = [(np.array([-1]), np.array([0]), np.array([-1]))]  # token, count, parent: the root
        size = 1
        for n in range(ORDER + 1):
            inside = (node >= 0) & (windows[n] >= 0)
            windows, node = windows[:, inside], node[inside]
            starts = np.flatnonzero(np.diff(node, prepend=-1) | np.diff(windows[n], prepend=-1))
            counts = np.diff(starts, append=len(node))
            kept = most_frequent(node[starts], counts) if n else np.full(len(starts), True)
            levels.append((windows[n][starts][kept], counts[kept], node[starts][kept]))
            number = np.where(kept, size - 1 + np.cumsum(kept), -1)
            node = np.repeat(number, counts)
            inner, size = size, size + len(levels[-1][0])
        token, count, parent = (np.concatenate(column) for column in zip(*levels))
        first = np.searchsorted(parent, np.arange(inner + 1))
        # Python's own search in a memoryview is faster than numpy's for one number.
        self.token, self.count, self.first = (
            memoryview(column.astype(np.int32)) for column in (token, count, first)
        )

    def followers(self, suffix):
        """The tokens that followed, and the count of each; neither where the suffix is new."""
        node = 0
        for token in suffix:
            end = self.first[node + 1]
            node = bisect_left(self.token, token, self.first[node], end)
            if node == end or self.token[node] != token:
                return (), ()
        children = slice(self.first[node], self.first[node + 1])
        return self.token[children].tolist(), self.count[children].tolist()


def most_frequent(parents, counts):
    """(M,) bool: which of M siblings, sorted by parent, are among the ``FOLLOWERS`` best of each.

    Of equal counts the first win.
    """
    kept = np.full(len(parents), True)
    crowded = np.flatnonzero(np.bincount(parents)[parents] > FOLLOWERS)
    best_first = crowded[np.lexsort((-counts[crowded], parents[crowded]))]
    family = parents[best_first]
    rank = np.arange(len(family)) - np.searchsorted(family, family)
    kept[best_first[rank >= FOLLOWERS]] = False
    return kept


class NGrams:
    """The distribution after a context, from this text and, where there is one, a datastore.

    >>> ngrams = NGrams(Datastore([5, 6, 7, 5, 6, 8, 0], end=0))
    >>> ngrams.grow([1, 5, 6, 7])
    >>> ngrams.likeliest([5, 6], 2)
    [(7, 0.5666666666666667), (8, 0.13333333333333336)]
    """

    def __init__(self, datastore=None):
        self.text = Text()
        self.tables = [self.text] if datastore is None else [self.text, datastore]

    def grow(self, tokens):
        """Append accepted tokens to this text."""
        self.text.grow(tokens)

    def distribution(self, context):
        """{token: probability}: the sum is below 1, and 0 where no suffix was seen before."""
        left, blend = 1.0, {}
        for _, doubt, tokens, counts in self._known(context):
            c = sum(counts)
            each = left / (c + doubt * len(tokens))
            for token, count in zip(tokens, counts):
                blend[token] = blend.get(token, 0.0) + each * count
            left -= each * c
        return blend

    def likeliest(self, context, k):
        """At most k pairs (token, probability), the likeliest first."""
        return top(self.distribution(context), k)

    def matched(self, context, token):
        """The length of the longest suffix that ``token`` followed before; 0 for none."""
        found = (length for length, _, tokens, _ in self._known(context) if token in tokens)
        return next(found, 0)

    def _known(self, context):
        """For each suffix that a table knows: its length, doubt, followers and their counts."""
        for length in range(min(ORDER, len(context)), 0, -1):
            for table in self.tables:
                tokens, counts = table.followers(context[-length:])
                if tokens:
                    yield length, table.doubts[length - 1], tokens, counts


def top(blend, k):
    """At most k pairs (token, probability) of a ``distribution``, the likeliest first."""
    return [(token, blend[token]) for token in sorted(blend, key=blend.get, reverse=True)[:k]]
