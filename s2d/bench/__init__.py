"""Figures: by ``compare`` from Python, and by ``python -m s2d.bench`` (README.md here)."""

from functools import partial

from .. import find_public

PUBLIC = {"Comparison": "tables", "compare": "measure", "corpus_questions": "specbench"}
__all__ = list(PUBLIC)
__getattr__ = partial(find_public, __name__, PUBLIC)
