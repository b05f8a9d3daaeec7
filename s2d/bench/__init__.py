"""Measuring on questions: speed next to transformers (``speed``), whether drafting pays (``pays``)
and the papers' experiments (``papers``), in tables of the same rows (``methods``, ``measure``,
``tables``); a check of a folder against transformers (``hf``); Spec-Bench's files."""
