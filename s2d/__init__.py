"""Sorted Speculative Decoding (S2D): one draft that holds several, exact verification."""

from functools import partial
from importlib import import_module

__version__ = "0.1.0"
# {a public name: the module that has it}
PUBLIC = {
    "Decoder": "decoder",
    "Draws": "sampling",
    "Exit": "draft",
    "FixedShape": "tree",
    "GrowingShape": "tree",
    "LayerExit": "draft",
    "Prediction": "rules",
    "Proposal": "rules",
    "Rule": "rules",
    "Shape": "tree",
    "SortedDraft": "draft",
    "StopStrings": "checkpoint.tokenizer",
    "Tokenizer": "checkpoint.tokenizer",
    "load_pair": "pair.loading",
    "generate": "generation",
    "generate_many": "passes.batch",
    "load_model": "checkpoint.load",
    "start": "generation",
}
__all__ = list(PUBLIC)


def find_public(package: str, public: dict[str, str], name: str) -> object:
    """Import a public name when it is asked for first, as PyTorch takes seconds."""
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(f"{package}.{public[name]}"), name)


__getattr__ = partial(find_public, __name__, PUBLIC)
