"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from .decode import decode
from .generate import generate
from .text.tokenizer import Tokenizer
from .weights import load_model

__all__ = ["Tokenizer", "decode", "generate", "generate_many", "load_model"]


def __getattr__(name):  # most programs do not need it
    if name != "generate_many":
        raise AttributeError(f"module 's2d' has no attribute {name!r}")
    from .extras.many import generate_many

    return generate_many
