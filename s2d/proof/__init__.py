"""Is a decoder lossless? The exact law of any program that draws at random; see README.md."""

from functools import partial

from .. import find_public

PUBLIC = {"Law": "forks", "TableModel": "models", "law": "forks", "measure": "lossless"}
PUBLIC |= {"checked": "promises", "text_law": "models"}
__all__ = list(PUBLIC)
__getattr__ = partial(find_public, __name__, PUBLIC)
