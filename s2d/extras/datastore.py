"""A datastore for exit 0: the n-grams of a fixed text, beside those of the text at hand (ngram.py).

Its file is safetensors with one tensor ``tokens`` (N,): documents, with an end-of-text token after
each, so that nothing is read across two of them.
"""

from bisect import bisect_left
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..files import staged_file
from ..ngram import FOLLOWERS, ORDER


def load_datastore(path, config):
    """The Datastore in the file ``path`` for a target of ``config``; ValueError if it is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no datastore at {path}; make one with: python -m s2d.train text")
    try:
        tokens = load_file(path)["tokens"].to(torch.int32)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is no datastore, or is damaged ({error})") from None
    if tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"{path} is damaged: its tokens are not a list")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"{path} is not for a vocabulary of {config.vocab_size} tokens")
    return Datastore(tokens, end_of(config))


def save_datastore(path, documents, config):
    """Write lists of ids as the datastore of a target of ``config``; returns how many ids."""
    end, tokens = end_of(config), []
    for document in documents:
        tokens += document if document[-1:] == [end] else [*document, end]
    dtype = torch.uint16 if config.vocab_size <= 2**16 else torch.int32
    with staged_file(path) as stage:
        save_file({"tokens": torch.tensor(tokens, dtype=torch.int32).to(dtype)}, stage)
    return len(tokens)


def end_of(config):
    """The id that ends a document."""
    if not config.eos_token_ids:
        raise ValueError("the target names no eos_token_id, which ends a datastore's documents")
    return config.eos_token_ids[0]


class Datastore:
    """The n-grams of a fixed list of tokens: a trie whose nodes are numbered level by level.

    Every node is a different n-gram. Its children, the tokens that followed it, are neighbours in
    ascending order, so that a step down the trie is one binary search. The three arrays take about
    20 bytes a token of English text. A suffix keeps its ``FOLLOWERS`` most frequent followers.

    tokens: ids (N,), of any vocabulary, each at least 0
    end: the id that ends a document; no n-gram goes on behind it
    """

    doubts = 3.0, 3.0, 3.0, 3.0  # by the suffix's length, as Text's

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
    """(M,) bool: which of M siblings, sorted by parent, are the ``FOLLOWERS`` best of each."""
    kept = np.full(len(parents), True)
    crowded = np.flatnonzero(np.bincount(parents)[parents] > FOLLOWERS)
    best_first = crowded[np.lexsort((-counts[crowded], parents[crowded]))]
    family = parents[best_first]
    rank = np.arange(len(family)) - np.searchsorted(family, family)
    kept[best_first[rank >= FOLLOWERS]] = False
    return kept
