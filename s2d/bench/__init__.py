"""Measuring: speed next to transformers, the papers' experiments.

``compare`` does it from Python. The programs are ``python -m s2d.bench``, see README.md here.
"""

from importlib import import_module

# As in s2d/__init__.py.
PUBLIC = {"Comparison": "tables", "compare": "measure", "corpus_questions": "specbench"}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
