"""Models are loaded once for the whole run."""

import functools

import pytest
from helpers import WEIGHTS

from s2d import Tokenizer, load_model, static


@pytest.fixture(scope="session")
def mini():
    """mini("mini-7b") -> the shipped model in float64."""
    return functools.cache(lambda name: load_model(WEIGHTS / name, dtype="float64"))


@pytest.fixture
def nothing_compiled(tmp_path, monkeypatch):
    """Neither in this process nor on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    for memo in (static.compiled_block, static.compiled_head):
        memo.cache_clear()


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(WEIGHTS / "mini-7b" / "tokenizer.model")
