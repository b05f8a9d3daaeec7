"""A conversation on a terminal."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..speed.tensor_parallel import each_from_rank_0
from .terminal import Streamed


def hold_conversation(args: Namespace, models: Any) -> None:
    """Answer what is typed, line by line; the oldest turns are forgotten in time."""
    messages: list[str] = []
    room = models.pair.target.config.max_position_embeddings * 3 // 4
    for line in each_from_rank_0(typed(first=args.prompt)):
        messages.append(line)
        while len(messages) > 1 and len(models.encode(messages)) > room:
            messages = messages[2:]
        decoder = models.start(models.encode(messages))
        streamed = Streamed(models.pair.tokenizer, sys.stdout, models.colors, args.stop_strings)
        with suppress(KeyboardInterrupt):  # ends the answer
            for step in decoder:
                streamed.add(step)
        streamed.finish()
        messages.append(decoder.result().text(models.pair.tokenizer))


def typed(first: str | None = None) -> Iterator[str]:
    """``first``, if any, then each line that is typed, until Ctrl-D ends the input."""
    if first is not None:
        yield first
    with suppress(EOFError):
        while True:
            if line := input("> ").strip():
                yield line
