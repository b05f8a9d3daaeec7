"""Models are loaded once for the whole run."""

import functools

import pytest
from helpers import WEIGHTS

from s2d import Tokenizer, load_model


@pytest.fixture(scope="session")
def mini():
    """mini("mini-7b") -> the shipped model in float64."""
    return functools.cache(lambda name: load_model(WEIGHTS / name, dtype="float64"))


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(WEIGHTS / "mini-7b" / "tokenizer.model")
