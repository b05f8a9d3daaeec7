"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

import signal

from . import ctrl_c

if ctrl_c.is_starting():  # PyTorch takes seconds to load
    signal.signal(signal.SIGINT, ctrl_c.end_at_once)

from .decode import decode
from .extras.many import generate_many
from .generate import generate
from .text.tokenizer import Tokenizer
from .weights import load_model

__all__ = ["Tokenizer", "decode", "generate", "generate_many", "load_model"]
