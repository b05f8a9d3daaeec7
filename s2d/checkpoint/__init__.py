"""A folder of other people's files <-> a model, a tokenizer and a chat format; see README.md."""

from .load import DTYPES, check_device, empty_model, is_fast, load_model, placement, save_model

__all__ = ["DTYPES", "check_device", "empty_model", "is_fast", "load_model", "placement"]
__all__ += ["save_model"]
