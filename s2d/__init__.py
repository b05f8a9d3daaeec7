"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from .batch import generate_many
from .checkpoint import load_model
from .checkpoint.names import find_draft
from .checkpoint.tokenizer import StopStrings, Tokenizer
from .generation import generate, start
from .ngram.datastore import load_datastore
from .tree import GrowingShape

__all__ = [
    "GrowingShape",
    "StopStrings",
    "Tokenizer",
    "find_draft",
    "generate",
    "generate_many",
    "load_datastore",
    "load_model",
    "start",
]
