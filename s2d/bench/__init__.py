"""Measuring on questions: speed next to transformers (``speed``) and the papers' experiments
(``papers``), in tables of the same rows (``methods``, ``measure``, ``tables``); a check of a folder
against transformers (``hf``); whether drafting pays here (``pays``, ``chains``); exit 0
(``exit0``); Spec-Bench's files (``specbench``)."""
