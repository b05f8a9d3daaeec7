"""Looking at an answer: every step of it as a page, or its text in colours on a terminal.

generation = start(target, prompt, draft, method, **options)
with traced("page.html", Recorder(tokenizer, prompt, names, generation)) as recorder:
    for step in generation:
        recorder.add(step)
"""

from .page import check_page, traced
from .record import Recorder

__all__ = ["Recorder", "check_page", "traced"]
