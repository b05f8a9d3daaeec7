"""The benchmark, behind its own door: ``python -m s2d.bench``. README.md beside this file holds what it measured."""
