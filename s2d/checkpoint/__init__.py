"""A folder of other people's files <-> a model, a tokenizer and a chat format; see README.md."""

from importlib import import_module

PUBLIC = "DTYPES", "check_device", "empty_model", "is_fast", "load_model", "placement", "save_model"
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    """Import what is in load.py when it is asked for, as PyTorch takes seconds."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.load"), name)
