"""A datastore: the n-grams of a fixed text, which exit 0 knows besides those of the text so far.

A fixed text that predicts others is the idea of REST (He et al. 2023, arXiv 2311.08252). The file
is safetensors with one tensor ``tokens`` (N,). It holds documents, with an EOS token after each, so
that no n-gram goes on from one document to the next.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ..checkpoint.files import read_safetensors, staged
from ..model import Llama, LlamaConfig
from .table import ORDER, TableExit

FOLLOWERS = 64  # the most frequent tokens that are kept for one suffix; this bounds the time
NOTHING = -1  # what stands after the end of a document


def load_datastore(path: Path | str, config: LlamaConfig) -> "Datastore":
    """The Datastore in the file ``path``, for a target of ``config``.

    Raises ValueError if the file is damaged, or holds anything but ids of the target's vocabulary.
    """
    tensors, _ = read_safetensors(path, "datastore")
    tokens = tensors.get("tokens")
    if tokens is None:
        raise ValueError(f"no datastore at {path}, but a file without ids called tokens")
    try:
        datastore = Datastore(tokens.numpy(), config.eos_token_ids)
        check_datastore(datastore, config.vocab_size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return datastore


def check_datastore(datastore: "Datastore", vocab_size: int) -> None:
    """Raise ValueError for a datastore that has tokens beyond a vocabulary."""
    if datastore.largest >= vocab_size:
        words = f"the token {datastore.largest}, and the target has tokens 0 to {vocab_size - 1}"
        raise ValueError(f"the datastore has {words}")


def reading(datastore: "Datastore") -> type[TableExit]:
    """Exit 0 that knows a ``datastore``, as it is given: ``generate(..., exits=[reading(store)])``.

    ValueError, when it is made, if the target's vocabulary has not all tokens of the datastore.
    """

    class ReadingExit(TableExit):
        def __init__(self, target: Llama, draft: Llama | None = None) -> None:
            check_datastore(datastore, target.config.vocab_size)
            super().__init__(target, draft)
            self.tables.append(datastore)

    return ReadingExit


def save_datastore(path: Path, documents: list[list[int]], config: LlamaConfig) -> None:
    """Write ``documents``, lists of ids, as the datastore of a target of ``config``."""
    if not config.eos_token_ids:
        raise ValueError("the target has no EOS token, with which the documents of a datastore end")
    end = config.eos_token_ids[0]
    tokens = [token for document in documents for token in (*document, end)]
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
        """``tokens``: ids (N,), each at least 0. ``end``: the ids that end a document.

        Raises ValueError for ``tokens`` that are no ids.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0)):
            words = f"numbers of shape {ids.shape} in {ids.dtype}"
            raise ValueError(f"a datastore's tokens are ids (N,) from 0, not {words}")
        self.largest = int(ids.max(initial=0))
        column = ids.astype(np.int32)
        columns = [column]
        for _ in range(ORDER):
            following = np.append(column[1:], np.int32(NOTHING))[: len(column)]
            is_end = np.isin(column, [*end, NOTHING])
            column = np.where(is_end, np.int32(NOTHING), following)
            columns.append(column)
        order = np.lexsort(columns[::-1])  # by the first column, then by the second, and so on
        # Python's own search in a memoryview is faster than numpy's for one number.
        self.columns = [memoryview(column[order]) for column in columns]
        self.followers = lru_cache(maxsize=4096)(self.count_followers)

    def count_followers(self, suffix: tuple[int, ...]) -> dict[int, int]:
        """The ``FOLLOWERS`` most frequent tokens that followed, with their counts."""
        start = 0
        end = len(self.columns[0])
        for token, column in zip(suffix, self.columns):
            start = bisect_left(column, token, start, end)
            end = bisect_right(column, token, start, end)
        counts = Counter(self.columns[len(suffix)][start:end])
        del counts[NOTHING]  # it need not be there
        return dict(counts.most_common(FOLLOWERS))
