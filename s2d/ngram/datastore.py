"""A datastore: the n-grams of a fixed text, which exit 0 knows besides those of the text so far.

That a fixed text predicts others is known as REST (He et al. 2023, arXiv 2311.08252). The file is
safetensors with one tensor ``tokens`` (N,): documents, with an EOS token after each, so that
nothing is read across two of them.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..checkpoint.files import staged
from ..model import LlamaConfig
from .table import FOLLOWERS, ORDER


def load_datastore(path: Path, config: LlamaConfig) -> "Datastore":
    """The Datastore in the file ``path`` for a target of ``config``; ValueError if it is none."""
    try:
        tokens = load_file(path)["tokens"].to(torch.int32)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is no datastore, or is damaged ({error})") from None
    if tokens.dim() != 1 or ((tokens < 0) | (tokens >= config.vocab_size)).any():
        raise ValueError(f"{path} is no list of ids of a vocabulary of {config.vocab_size} tokens")
    return Datastore(tokens, config.eos_token_ids)


def save_datastore(path: Path, documents: list[list[int]], config: LlamaConfig) -> None:
    """Write lists of ids as the datastore of a target of ``config``; ValueError: it has no EOS."""
    if not config.eos_token_ids:
        raise ValueError("the target has no EOS token, with which the documents of a datastore end")
    tokens = [token for document in documents for token in (*document, config.eos_token_ids[0])]
    dtype = torch.uint16 if config.vocab_size <= 2**16 else torch.int32
    with staged(path) as stage:
        save_file({"tokens": torch.tensor(tokens, dtype=dtype)}, stage)


class Datastore:
    """The n-grams of a fixed list of tokens: a trie whose nodes are numbered level by level.

    Every node is a different n-gram. Its children, the tokens that followed it, are neighbours in
    ascending order, so that a step down the trie is one binary search. Of the text 5 6 5 7, where
    -1 says that nothing follows, the root and two levels are:

        node                  0   1   2   3   4   5   6   7
        n-gram                    5   6   7  56  57  65   7
        token                -1   5   6   7   6   7   5  -1
        count                 0   2   1   1   1   1   1   1
        its first child       1   4   6   7

    The three arrays take about 20 bytes a token of English text.

    Args:
        tokens: ids (N,), of any vocabulary, each at least 0.
        end: the ids that end a document; no n-gram goes on after them.
    """

    doubts = 3.0, 3.0, 3.0, 3.0  # by the suffix's length, see ``table.distribution``

    def __init__(self, tokens: Sequence[int], end: Sequence[int]) -> None:
        tokens = np.asarray(tokens, dtype=np.int32)
        rows = [tokens]  # row n: the token n after each one; -1 after the end of its document
        for _ in range(ORDER):
            following = np.append(rows[-1][1:], np.int32(-1))
            rows.append(np.where(np.isin(tokens, end), np.int32(-1), following))
        windows = np.stack(rows)[:, np.lexsort(rows[::-1])]  # (ORDER + 1, N), sorted
        new = np.full(len(tokens), False)  # whether a window is the first of its n-gram
        node = np.zeros(len(tokens), dtype=np.int64)  # the n-gram of each window: at first the root
        levels = [(np.array([-1]), np.array([0]), np.array([-1]))]  # token, count, parent: the root
        size = 1  # nodes so far
        for row in windows:  # a level of the trie
            new |= np.diff(row, prepend=-2) != 0
            starts = np.flatnonzero(new)
            levels.append((row[starts], np.diff(starts, append=len(row)), node[starts]))
            node = size - 1 + np.cumsum(new)
            inner = size  # those that have children: all but the last level
            size += len(starts)
        token, count, parent = (np.concatenate(column) for column in zip(*levels))
        first = np.searchsorted(parent, np.arange(inner + 1))  # child of each node
        # Python's own search in a memoryview is faster than numpy's for one number.
        self.token, self.count, self.first = (
            memoryview(column.astype(np.int32)) for column in (token, count, first)
        )
        self.known = {}  # node -> what ``followers`` returns there

    def followers(self, suffix: Sequence[int]) -> tuple[Collection[int], Collection[int]]:
        """The ``FOLLOWERS`` most frequent tokens that followed, and the count of each.

        Neither where the suffix is new.
        """
        node = 0
        for token in suffix:
            end = self.first[node + 1]
            node = bisect_left(self.token, token, self.first[node], end)
            if node == end or self.token[node] != token:
                return (), ()
        if node not in self.known:
            end = self.first[node + 1]
            start = bisect_left(self.token, 0, self.first[node], end)  # after -1, a text's end
            tokens = np.asarray(self.token[start:end])
            counts = np.asarray(self.count[start:end])
            # Frequent tokens have thousands of followers.
            best = np.sort(np.argsort(-counts, kind="stable")[:FOLLOWERS])
            self.known[node] = tokens[best].tolist(), counts[best].tolist()
        return self.known[node]
