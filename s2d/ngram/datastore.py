"""A datastore: the n-grams of a fixed text, which exit 0 knows besides those of the text so far.

A fixed text that predicts others is the idea of REST (He et al. 2023, arXiv 2311.08252). The file
is safetensors with one tensor ``tokens`` (N,). It holds documents, with an EOS token after each, so
that no n-gram goes on from one document to the next.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..checkpoint.files import staged
from ..model import LlamaConfig
from .table import FOLLOWERS, ORDER

NOTHING = -1  # what stands after the end of a document
ID_DTYPES = (torch.uint16, torch.int32, torch.int64)


def load_datastore(path: Path, config: LlamaConfig) -> "Datastore":
    """The Datastore in the file ``path``, for a target of ``config``.

    Raises ValueError if the file is damaged, or holds anything but ids of the target's vocabulary.
    """
    try:
        tokens = load_file(path)["tokens"]
    except (SafetensorError, KeyError, OSError) as error:
        raise ValueError(f"{path} is no datastore, or is damaged ({error})") from None
    size = config.vocab_size
    is_list = tokens.dim() == 1 and tokens.dtype in ID_DTYPES
    if is_list:
        tokens = tokens.long()
    if not is_list or ((tokens < 0) | (tokens >= size)).any():
        expected = f"ids of the target's vocabulary of {size} tokens"
        raise ValueError(f"{path} holds another vocabulary; expected {expected}")
    return Datastore(tokens.numpy(), config.eos_token_ids)


def save_datastore(path: Path, documents: list[list[int]], config: LlamaConfig) -> None:
    """Write ``documents``, lists of ids, as the datastore of a target of ``config``.

    Raises ValueError if the target has no EOS token.
    """
    if not config.eos_token_ids:
        raise ValueError("the target has no EOS token, with which the documents of a datastore end")
    tokens: list[int] = []
    for document in documents:
        tokens += document
        tokens.append(config.eos_token_ids[0])
    dtype = torch.uint16 if config.vocab_size <= 2**16 else torch.int32
    with staged(path) as stage:
        save_file({"tokens": torch.tensor(tokens, dtype=dtype)}, stage)


class Datastore:
    """The n-grams of a fixed list of tokens: all of its windows, sorted.

    A window is a token with the ``ORDER`` tokens after it. In sorted order, all windows that begin
    with the same n-gram are neighbours, so that binary search finds them. Of the text 5 6 5 7,
    where -1 says that nothing follows, the sorted windows of three tokens are:

        row       0   1   2   3
        first     5   5   6   7
        second    6   7   5  -1
        third     5  -1   7  -1

    The suffix 5 is found in the rows 0 and 1. So 6 and 7 followed it, once each. The columns take
    20 bytes for each token of the text.
    """

    doubts = (3.0, 3.0, 3.0, 3.0)  # by the suffix's length, see ``table.distribution``

    def __init__(self, tokens: Sequence[int], end: Sequence[int]) -> None:
        """``tokens``: ids (N,), each at least 0. ``end``: the ids that end a document."""
        column = np.asarray(tokens, dtype=np.int32)
        columns = [column]
        for _ in range(ORDER):
            following = np.append(column[1:], np.int32(NOTHING))[: len(column)]
            is_end = np.isin(column, [*end, NOTHING])
            column = np.where(is_end, np.int32(NOTHING), following)
            columns.append(column)
        order = np.lexsort(columns[::-1])  # by the first column, then by the second, and so on
        # Python's own search in a memoryview is faster than numpy's for one number.
        self.columns = [memoryview(column[order]) for column in columns]
        self.known: dict[tuple[int, ...], dict[int, int]] = {}  # what ``followers`` has returned

    def followers(self, suffix: Sequence[int]) -> dict[int, int]:
        """The ``FOLLOWERS`` most frequent tokens that followed, with their counts."""
        suffix = tuple(suffix)
        if suffix in self.known:
            return self.known[suffix]
        start = 0
        end = len(self.columns[0])
        for token, column in zip(suffix, self.columns):
            start = bisect_left(column, token, start, end)
            end = bisect_right(column, token, start, end)
        if start == end:
            return {}
        counts = Counter(self.columns[len(suffix)][start:end])
        del counts[NOTHING]  # it need not be there
        self.known[suffix] = dict(counts.most_common(FOLLOWERS))
        return self.known[suffix]
