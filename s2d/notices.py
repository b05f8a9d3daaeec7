"""Notices on stderr, and how far a long run is."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import nn

PROGRESS_SECONDS = 10  # between two notices of a long run


def tell(message: Any) -> None:
    """A notice, one line on stderr; one that nobody can read costs no answer."""
    with suppress(OSError):
        print(" ".join(str(message).split()), file=sys.stderr, flush=True)


def progress(items: Iterable, what: str, total: int | None = None) -> Iterator:
    """Yield ``items``; of what takes long, tell every ten seconds how far it is."""
    began = time.monotonic()
    told = began
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - told >= PROGRESS_SECONDS:
            told = now
            rate = done / (now - began)
            line = f"{what}: {done} of {total}" if total else f"{what}: {done}"
            line += f", {rate:.0f} per second" if rate >= 10 else f", {rate:.2g} per second"
            if total and rate:
                line += f", {timedelta(seconds=round((total - done) / rate))} left"
            tell(line)
        yield item


def tell_of_next_pass(layers: nn.ModuleList, what: str) -> None:
    """Tell how far the next pass through ``layers`` is, layer by layer, if it takes long."""
    begun = progress(layers, what, len(layers))
    next(begun)  # the first layer begins

    def count_layer(*_: Any) -> None:
        next(begun, None)  # the next one begins, if there is one

    hooks = [layer.register_forward_hook(count_layer) for layer in layers]

    def remove_all(*_: Any) -> None:
        for hook in hooks:
            hook.remove()

    hooks.append(layers[-1].register_forward_hook(remove_all))
