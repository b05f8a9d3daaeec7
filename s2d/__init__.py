"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from .decode import decode
from .generate import generate
from .tokenizer import Tokenizer
from .weights import load_model

__all__ = ["Tokenizer", "decode", "generate", "load_model"]
