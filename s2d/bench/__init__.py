"""Measuring: speed next to transformers (``speed``), exit 0 (``exit0``), the papers' experiments
(``papers``, ``experiments``, ``lab``), Spec-Bench's files (``specbench``)."""
