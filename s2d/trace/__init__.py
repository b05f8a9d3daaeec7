"""Looking at an answer: where each token came from, and every step of it as a page.

    generation = start(target, prompt, draft, method, **options)
    with traced("page.html", Recorder(tokenizer, prompt, names, generation.plan)) as recorder:
        for step in generation:
            recorder.add(step)

Knows nothing about training and benchmark.
"""

from contextlib import contextmanager

from ..program import tell
from .page import check_page, write_page
from .record import Recorder

__all__ = ["Recorder", "check_page", "traced"]


@contextmanager
def traced(file, recorder):
    """The ``recorder``; its page is written in the end, even where the answer was interrupted."""
    check_page(file)
    try:
        yield recorder
    finally:
        if recorder.steps:
            try:
                write_page(recorder.data(), file)
            except OSError as error:
                raise ValueError(f"{file} could not be written ({error.strerror})") from None
            tell(f"every step: {file}")
