"""Training, behind its own door: ``python -m s2d.train``. README.md tells what it made."""
