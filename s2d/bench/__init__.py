"""The benchmark: ``python -m s2d.bench``. README.md holds what it measured."""
