"""A conversation on a terminal, a line a turn. Knows nothing about models or drafting."""

import importlib
import sys
from contextlib import suppress

from ..program import tell
from .terminal import Streamed, announced

KEYS = "Ctrl-C ends an answer, Ctrl-D the conversation, /reset begins a new one; "
KEYS += "a line that ends with \\ goes on in the next"


def converse(begin, tokenizer, encode, size, reserve, first, colors):
    """Ctrl-C ends an answer, Ctrl-D all; what no longer fits the context is forgotten.

    ``begin``: the ids of a prompt -> a Generation; ``encode``: messages -> the ids of their prompt;
    ``size`` is the context's, of which an answer gets ``reserve``; ``first`` is the first line, or
    None.
    """
    tell(KEYS)
    if sys.stdin and sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(ImportError):  # with it, if Python has it, lines can be edited and come back
            importlib.import_module("readline")
    if hasattr(sys.stdin, "reconfigure"):  # a line that is not UTF-8 takes no other with it
        sys.stdin.reconfigure(errors="surrogateescape")
    messages = []
    for line in lines(first):
        if line == "/reset":
            messages = []
            tell("all is forgotten")
            continue
        tokens = len(encode([line]))
        if tokens >= size:
            tell(f"that makes {tokens} tokens, and the context holds {size}; say it in fewer words")
            continue
        messages, forgotten = [*messages, line], 0
        while len(messages) > 1 and len(encode(messages)) > size - reserve:
            messages, forgotten = messages[2:], forgotten + 1
        if forgotten:
            tell(f"the context of {size} tokens is full: turns forgotten: {forgotten}")
        prompt = encode(messages)
        generation = begin(prompt)
        streamed = Streamed(tokenizer, sys.stdout, colors)
        try:
            for step in announced(generation, len(prompt)):
                streamed.add(step)
            stats, speed = generation.stats, generation.tokens_per_second
            passes = f"{stats.steps} passes of the target ({stats.mean_accepted_tokens:.2f} each)"
            result = f"{len(generation.tokens)} tokens in {passes}, {speed:.1f} tokens/s"
        except KeyboardInterrupt:
            result = "interrupted"
        streamed.finish()
        said = tokenizer.decode(generation.tokens)
        messages = [*messages, said] if generation.tokens else messages[:-1]
        tell(result)
        if len(prompt) + len(generation.tokens) >= size:
            tell(f"the context of {size} tokens is full: the answer ends here")


def lines(first):
    """``first``, then what the user types, up to the end of input; only what says something."""
    line = first or ""
    while True:
        if line.strip():
            yield line.strip()
        line = ""
        try:
            line = typed()
        except (EOFError, RuntimeError):  # the end, or no stdin at all
            print()
            return
        except KeyboardInterrupt:
            print()
        except UnicodeError:
            tell("that line is not UTF-8")


def typed():
    """A line, and the next where it ends with a backslash. UnicodeError if it is not UTF-8."""
    parts = [input("> ")]
    with suppress(EOFError):
        while parts[-1].endswith("\\"):
            parts.append(input("... "))
    text = "\n".join(part.removesuffix("\\") for part in parts)
    text.encode()
    return text
