"""Measuring: speed next to transformers, whether drafting pays, the papers' experiments.

``compare`` does it from Python. The programs are ``python -m s2d.bench``, see README.md here.
"""

from .measure import compare
from .tables import Comparison

__all__ = ["Comparison", "compare"]
