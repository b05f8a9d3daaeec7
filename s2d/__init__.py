"""Sorted Speculative Decoding (S2D): one draft model that holds several, exact verification, plain PyTorch."""

from .decode import generate
from .tokenizer import Tokenizer
from .weights import load_model

__all__ = ["Tokenizer", "generate", "load_model"]
