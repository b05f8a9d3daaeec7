"""The benchmark, behind its own door: ``python -m s2d.bench``. README.md holds what it measured."""
