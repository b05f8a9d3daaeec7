"""A conversation on a terminal."""

import sys
from contextlib import suppress

from ..program import tell
from .terminal import Streamed


def converse(begin, tokenizer, encode, size, first):
    """Answer ``first``, if any, then each line typed; old turns go when 3/4 of ``size`` is full.

    ``begin``: ids of a prompt -> a Decoder; ``encode``: messages -> ids of their prompt.
    """
    tell("Ctrl-C ends an answer, Ctrl-D the conversation")
    with suppress(ImportError):
        import readline  # noqa: F401  # lets lines be edited
    messages = []
    with suppress(EOFError):
        while True:
            line, first = first or input("> "), None
            if not line.strip():
                continue
            messages.append(line)
            while len(messages) > 1 and len(encode(messages)) > size * 3 // 4:
                messages = messages[2:]
            generation = begin(encode(messages))
            streamed = Streamed(tokenizer, sys.stdout, generation.options.exits)
            with suppress(KeyboardInterrupt):
                for step in generation:
                    streamed.add(step)
            streamed.finish()
            messages.append(tokenizer.decode(generation.tokens))
    print()
