"""A conversation on a terminal, a line a turn. Knows nothing about models or drafting."""

import sys

from ..generate import start
from .terminal import Streamed, gain


def converse(target, tokenizer, template, options, first, colors):
    """Ctrl-C ends an answer, Ctrl-D all; what no longer fits the context is forgotten.

    ``first`` is the first line, or None; ``options`` are those of ``start``.
    """
    print("Ctrl-C ends an answer, Ctrl-D the conversation", file=sys.stderr)
    if hasattr(sys.stdin, "reconfigure"):  # a line that is not UTF-8 takes no other with it
        sys.stdin.reconfigure(errors="surrogateescape")
    size, messages = target.config.max_position_embeddings, []
    for line in lines(first):
        tokens = len(tokenizer.encode_chat([line], template))
        if tokens >= size:
            tell(f"that makes {tokens} tokens, and the context holds {size}; say it in fewer words")
            continue
        messages, prompt, forgotten = fit([*messages, line], tokenizer, template, options, size)
        if forgotten:
            tell(f"the context of {size} tokens is full: turns forgotten: {forgotten}")
        generation = start(target, prompt, **options)
        streamed = Streamed(tokenizer, sys.stdout, colors)
        try:
            for step in generation:
                streamed.add(step)
            result = gain(generation)
        except KeyboardInterrupt:
            result = "interrupted"
        streamed.finish()
        said = tokenizer.decode(generation.tokens)
        messages = [*messages, said] if generation.tokens else messages[:-1]
        tell(result)
        if len(prompt) + len(generation.tokens) >= size:
            tell(f"the context of {size} tokens is full: the answer ends here")


def fit(messages, tokenizer, template, options, size):
    """The last of ``messages`` that leave space for an answer, their prompt, turns forgotten."""
    forgotten, prompt = 0, tokenizer.encode_chat(messages, template)
    while len(messages) > 1 and len(prompt) + min(options["max_new_tokens"], size // 4) > size:
        messages, forgotten = messages[2:], forgotten + 1
        prompt = tokenizer.encode_chat(messages, template)
    return messages, prompt, forgotten


def lines(first):
    """``first``, unless it says nothing, then what the user types."""
    line = (first or "").strip() or ask()
    while line:
        yield line
        line = ask()


def ask():
    """A line from the user that says something; None at the end of input."""
    while True:
        try:
            line = input("> ").strip()
            line.encode()
            if line:
                return line
        except (EOFError, RuntimeError):  # the end, or no stdin at all
            return print()
        except KeyboardInterrupt:
            print()
        except UnicodeError:
            tell("that line is not UTF-8")


def tell(message):
    print(message, file=sys.stderr)
