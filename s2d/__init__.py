"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from .batch import generate_many
from .checkpoint import load_model
from .checkpoint.names import find_draft
from .checkpoint.tokenizer import StopStrings, Tokenizer
from .generation import generate, start

__all__ = [
    "StopStrings",
    "Tokenizer",
    "find_draft",
    "generate",
    "generate_many",
    "load_model",
    "start",
]
