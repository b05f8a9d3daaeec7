"""Measuring: speed next to transformers (``speed``), a check of a folder against transformers
(``hf``), exit 0 (``exit0``); Spec-Bench's files (``specbench``)."""
