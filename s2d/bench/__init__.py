"""Figures: by ``compare`` from Python, and by ``python -m s2d.bench`` (README.md here)."""

from importlib import import_module

# As in s2d/__init__.py.
PUBLIC = {"Comparison": "tables", "compare": "measure", "corpus_questions": "specbench"}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
