"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from importlib import import_module

from .decode import decode
from .generate import generate

# What not every program needs is loaded where it is first used.
LAZY = {
    "Tokenizer": "s2d.text.tokenizer",
    "generate_many": "s2d.extras.many",
    "load_model": "s2d.weights",
}
__all__ = ["decode", "generate", *LAZY]


def __getattr__(name):
    if name not in LAZY:
        raise AttributeError(f"module 's2d' has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)
