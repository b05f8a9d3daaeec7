"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from .checkpoint import load_model
from .checkpoint.names import find_draft
from .checkpoint.tokenizer import StopStrings, Tokenizer
from .generation import generate, start
from .speed.batch import generate_many
from .tree import GrowingShape

__all__ = [
    "GrowingShape",
    "StopStrings",
    "Tokenizer",
    "find_draft",
    "generate",
    "generate_many",
    "load_model",
    "start",
]
