"""A conversation on a terminal."""

import sys
from contextlib import suppress

from ..program import tell
from .terminal import Streamed


def converse(begin, tokenizer, encode, room, first, colors):
    """Answer ``first``, if it is not None, then each line that is typed.

    ``begin``: ids of a prompt -> a Generation; ``encode``: messages -> ids of their prompt. The
    oldest turns are dropped where that has more than ``room`` tokens.
    """
    tell("Ctrl-C ends an answer, Ctrl-D the conversation")
    with suppress(ImportError):
        import readline  # noqa: F401  # lets lines be edited
    messages = []
    with suppress(EOFError):
        while True:
            messages.append(first or input("> "))
            first = None
            while len(messages) > 1 and len(encode(messages)) > room:
                messages = messages[2:]
            generation = begin(encode(messages))
            streamed = Streamed(tokenizer, sys.stdout, colors)
            with suppress(KeyboardInterrupt):
                for step in generation:
                    streamed.add(step)
            streamed.finish()
            messages.append(tokenizer.decode(generation.tokens))
    print()
