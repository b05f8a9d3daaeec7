"""Is a decoder lossless? The exact law of any program that draws at random; see README.md."""

from importlib import import_module

# As in s2d/__init__.py.
PUBLIC = {"Law": "forks", "TableModel": "models", "law": "forks", "measure": "lossless"}
PUBLIC |= {"checked": "promises", "text_law": "models"}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
