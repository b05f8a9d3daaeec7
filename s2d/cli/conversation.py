"""A conversation on a terminal."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress

from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import Tokenizer
from ..generation import make_decoder
from ..pair.loading import Pair
from ..speed.tensor_parallel import from_rank_0
from .terminal import stream


def encode(messages: list[str], args: Namespace, tokenizer: Tokenizer) -> list[int]:
    """Messages, user and assistant in turn -> ids; of plain text, of the first alone."""
    if args.raw:
        return tokenizer.encode(messages[0])
    return tokenizer.encode_chat(messages, args.system, dict(args.template_option))


def hold_conversation(args: Namespace, pair: Pair) -> None:
    """Answer what is typed, line by line; the oldest turns are forgotten in time."""
    tell("Ctrl-C ends an answer, Ctrl-D the conversation")
    room = pair.target.config.max_position_embeddings * 3 // 4
    messages: list[str] = []
    lines = typed()
    while (line := from_rank_0(lambda: next(lines, None))) is not None:
        asked = [*messages, line]
        try:
            while len(asked) > 1 and len(encode(asked, args, pair.tokenizer)) > room:
                asked = asked[2:]
            prompt = encode(asked, args, pair.tokenizer)
            decoder = make_decoder(pair.target, prompt, pair.draft, pair.options)
        except ValueError as error:  # the line is too long, or the chat template refuses it
            tell(error)
            continue
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the answer
            stream(decoder, pair, args.stop_strings)
        messages = [*asked, decoder.result().text(pair.tokenizer)]


def typed() -> Iterator[str]:
    """The lines that are typed, until Ctrl-D ends the input."""
    with suppress(EOFError):
        while True:
            print("> ", end="", file=sys.stderr, flush=True)
            line = input()
            if line.strip():
                yield line
    print(file=sys.stderr)
