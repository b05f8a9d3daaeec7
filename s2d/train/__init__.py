"""Training, behind its own door: ``python -m s2d.train``. README.md beside this file tells what it made, and how."""
