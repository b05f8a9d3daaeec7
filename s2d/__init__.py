"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

import sys

if sys.argv[:1] == ["-m"]:  # python -m s2d.train, for example, imports this before its own file
    from .cli.interrupt import say_interrupted

    sys.excepthook = say_interrupted

from .extras.batch import generate_many
from .extras.target_roots import RootsDecoder
from .generation import DECODERS, generate, start
from .text.tokenizer import Tokenizer
from .weights import load_model

DECODERS["target"] = RootsDecoder

__all__ = ["Tokenizer", "generate", "generate_many", "load_model", "start"]
