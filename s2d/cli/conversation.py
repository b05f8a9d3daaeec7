"""A conversation on a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from ..checkpoint.tokenizer import Tokenizer
from ..decoder import Decoder
from ..notices import tell
from .colors import Color
from .terminal import Streamed


def converse(
    start: Callable[[list[int]], Decoder],
    encode: Callable[[list[str]], list[int]],
    tokenizer: Tokenizer,
    context_size: int,
    colors: dict[int, Color],
    lines: Iterable[str],
    stop_at: Sequence[str] = (),
) -> None:
    """Answer each of ``lines``.

    Args:
        start: ids of a prompt -> a Decoder.
        encode: messages, user and assistant in turn -> ids of their prompt.
        context_size: of the target; old turns are forgotten once three quarters of it are full.
        colors: of the exits.
        stop_at: texts at which answers end, as in the settings of each Decoder.
    """
    messages: list[str] = []
    with suppress(KeyboardInterrupt):  # while there is no answer to end
        for line in lines:
            if not line.strip():
                continue
            try:
                kept = with_room([*messages, line], encode, context_size * 3 // 4)
                decoder = start(encode(kept))
            except ValueError as error:  # the line is too long, or no text
                tell(error)
                continue
            messages = [*kept, stream(decoder, tokenizer, colors, stop_at)]
    print()


def typed(first: str | None = None) -> Iterator[str]:
    """``first``, if any, then each line that is typed, until Ctrl-D ends the input."""
    with suppress(ImportError):
        import readline  # noqa: F401  # lets lines be edited
    if first is not None:
        yield first
    with suppress(EOFError):
        while True:
            yield input("> ")


def with_room(
    messages: list[str], encode: Callable[[list[str]], list[int]], size: int
) -> list[str]:
    """The latest of ``messages`` whose prompt has up to ``size`` tokens; at least the last one."""
    while len(messages) > 1 and len(encode(messages)) > size:
        messages = messages[2:]
    return messages


def stream(
    decoder: Decoder, tokenizer: Tokenizer, colors: dict[int, Color], stop_at: Sequence[str]
) -> str:
    """Print an answer as it comes, until it ends or Ctrl-C ends it; its text."""
    streamed = Streamed(tokenizer, sys.stdout, colors, stop_at)
    with suppress(KeyboardInterrupt):
        for step in decoder:
            streamed.add(step)
    streamed.finish()
    return decoder.result().text(tokenizer)
