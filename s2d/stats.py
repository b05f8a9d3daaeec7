"""What a generation did: its steps, the numbers that they add up to, and the answer."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .options import Options
from .tree import Tree


class Clock:
    """Measures a step. ``lap`` is called after drafting, and after the target's pass."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def lap(self) -> None:
        self.times.append(time.perf_counter())

    def seconds(self) -> dict[str, float]:
        """What the step took until now, and two parts of it."""
        began, drafted, scored = self.times
        seconds = {"draft_seconds": drafted - began, "target_seconds": scored - drafted}
        return seconds | {"seconds": time.perf_counter() - began}


@dataclass
class Step:
    """One pass of the target, and the drafting before it."""

    tree: Tree
    logits: Tensor  # (N+1, V): row i is what the target says after node i of the tree
    accepted: list[int]  # the nodes of a path, up to the answer's end
    tokens: list[int]  # emitted: the path's tokens and the bonus token, up to the answer's end
    draft_seconds: float
    target_seconds: float  # from the end of drafting until the logits are there
    seconds: float  # of the whole step

    @property
    def sources(self) -> list[int | None]:
        """By emitted token: which exit drafted it, by its number of layers; None: the target."""
        drafted = [self.tree.exit_layers[node] for node in self.accepted]
        return drafted + [None] * (len(self.tokens) - len(drafted))


@dataclass
class Stats:
    """What all steps did together. The first pass reads the prompt as well."""

    accept_lengths: list[int] = field(default_factory=list)  # tokens emitted in each step
    exit_counts: Counter[int] = field(default_factory=Counter)  # exit -> its tokens that were sent
    exit_levels: Counter[int] = field(default_factory=Counter)  # exit -> its levels that were sent
    exit_accepted: Counter[int] = field(default_factory=Counter)  # exit -> its accepted tokens
    draft_levels: int = 0  # levels that were drafted, also those of which no node was sent
    draft_tokens: int = 0  # drafted nodes that were sent
    accepted_tokens: int = 0  # drafted tokens that were emitted, so without bonus tokens
    depth_sent: Counter[int] = field(default_factory=Counter)  # depth -> trees with a node there
    depth_accepted: Counter[int] = field(default_factory=Counter)  # depth -> accepted nodes
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        exits = step.tree.exit_layers[1:]  # of all nodes but the root
        exit_at = dict(zip(step.tree.depths[1:], exits))  # {depth: the exit of that level}
        self.accept_lengths.append(len(step.tokens))
        self.exit_counts.update(each for each in exits if each is not None)
        self.exit_levels.update(each for each in exit_at.values() if each is not None)
        self.exit_accepted.update(each for each in step.sources if each is not None)
        self.draft_levels += step.tree.depth
        self.draft_tokens += len(exits)
        self.accepted_tokens += len(step.accepted)
        self.depth_sent.update(exit_at.keys())
        self.depth_accepted.update(range(1, len(step.accepted) + 1))
        self.draft_seconds += step.draft_seconds
        self.target_seconds += step.target_seconds
        self.seconds += step.seconds

    @property
    def steps(self) -> int:
        return len(self.accept_lengths)

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens emitted per step (MAT), the bonus token included; 1.0 without a draft."""
        return sum(self.accept_lengths) / max(1, self.steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per drafted level; 0.0 without a draft."""
        return self.accepted_tokens / max(1, self.draft_levels)


@dataclass(frozen=True)
class Generation:
    """An answer, without the caches that it took."""

    tokens: list[int]  # the new ones, up to EOS or the last one that ``Options.stop_at`` allows
    ended: str  # "eos", "stop_at", "length", "context" (the target's is full), or "": it goes on
    stats: Stats
    options: Options
    exact: bool  # whether the method is lossless
    prompt_length: int

    def text(self, tokenizer: Any) -> str:
        """The answer as text, by a ``Tokenizer``."""
        if self.options.stop_at is not None:
            return self.options.stop_at.cut(self.tokens)
        return tokenizer.decode(self.tokens)
