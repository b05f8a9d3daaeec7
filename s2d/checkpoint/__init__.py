"""A folder of other people's files <-> a model, a tokenizer and a chat format: ``load`` (weights),
``config`` (config.json), ``shards`` (files of tensors), ``names`` (models by name), ``gguf`` (a
GGUF file becomes such a folder), ``tokenizer`` and ``chat``.

``python -m s2d.checkpoint get`` brings a real model."""

from .load import (
    DTYPES,
    check_device,
    choose_dtype,
    empty_model,
    is_fast,
    load_model,
    placement,
    save_model,
)

__all__ = [
    "DTYPES",
    "check_device",
    "choose_dtype",
    "empty_model",
    "is_fast",
    "load_model",
    "placement",
    "save_model",
]
