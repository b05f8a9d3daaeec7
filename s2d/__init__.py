"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from .extras.batch import generate_many
from .extras.target_roots import RootsDecoder
from .generation import DECODERS, generate, start
from .text.tokenizer import Tokenizer
from .weights import load_model

DECODERS["target"] = RootsDecoder

__all__ = ["Tokenizer", "generate", "generate_many", "load_model", "start"]
