"""A Hugging Face folder <-> a Llama: ``load`` (weights), ``config`` (config.json), ``shards``
(files of tensors), ``names`` (models by name), ``gguf`` (a GGUF file becomes such a folder).

``python -m s2d.weights get`` brings a real model."""

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
