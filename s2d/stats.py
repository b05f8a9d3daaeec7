"""What a generation did: its steps, the numbers that they add up to, and the answer."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .options import Plan
from .rules import Exit
from .tree import Tree


@dataclass
class Step:
    """One pass of the target, and the drafting before it. It is filled in part by part."""

    tree: Tree
    logits: Tensor = field(init=False)  # (N+1, V): row i is what the target says after node i
    accepted: list[int] = field(init=False)  # the nodes of a path, up to the answer's end
    tokens: list[int] = field(init=False)  # emitted: the path's, and the bonus token, up to the end
    draft_seconds: float = field(init=False)
    target_seconds: float = field(init=False)  # of the target's pass; on a GPU, until it is queued
    seconds: float = field(init=False)  # of the whole step

    @property
    def sources(self) -> list[int | None]:
        """By emitted token: which exit drafted it, by its number of layers; None: the target."""
        drafted = [self.tree.exit_layers[node] for node in self.accepted]
        return drafted + [None] * (len(self.tokens) - len(drafted))

    def log_probabilities(self) -> list[float]:
        """By emitted token: log p under the target, at temperature 1, without top-k and top-p."""
        before = [0, *self.accepted][: len(self.tokens)]  # the nodes that the tokens follow
        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        logs = self.logits[before].log_softmax(dim=-1, dtype=dtype)
        tokens = torch.tensor(self.tokens, device=logs.device)
        return logs.gather(1, tokens[:, None])[:, 0].tolist()


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
        """Tokens per step (MAT): the length of the answer divided by the number of steps.

        A step's tokens are those that it emits, the bonus token included. They end at EOS or at the
        token that completes a stop string, also inside of the accepted path. 1.0 without a draft.
        """
        return sum(self.accept_lengths) / max(1, self.steps)

    @property
    def accepted_per_level(self) -> float:
        """Accepted draft tokens per drafted level; 0.0 without a draft."""
        return self.accepted_tokens / max(1, self.draft_levels)

    def acceptance(self, exits: Iterable[int | Exit]) -> dict[str, Any]:
        """What was drafted and accepted, by position and by exit; ``exits`` are those of the plan.

        Names are those of vLLM's ``metrics.speculative_decoding``, or like them. A step counts if a
        tree was sent in it. The first position is 0. An exit counts as asked once for each level
        that it or a deeper one drafts. Levels of which no node was sent are not counted.
        """
        depths = range(1, len(self.depth_sent) + 1)
        layers = [each if isinstance(each, int) else each.exit_layer for each in exits]
        per_exit = {}
        for index, layer in enumerate(layers):
            per_exit[layer] = {
                "num_asked": sum(self.exit_levels[deeper] for deeper in layers[index:]),
                "num_draft_tokens": self.exit_counts[layer],
                "num_accepted_draft_tokens": self.exit_accepted[layer],
            }
        return {
            "draft_acceptance_rate": self.accepted_tokens / max(1, self.draft_tokens),
            "num_spec_steps": self.depth_sent[1],
            "num_draft_tokens": self.draft_tokens,
            "num_accepted_draft_tokens": self.accepted_tokens,
            "num_drafts_per_pos": [self.depth_sent[depth] for depth in depths],
            "num_accepted_tokens_per_pos": [self.depth_accepted[depth] for depth in depths],
            "rates_per_pos": [self.depth_accepted[d] / self.depth_sent[d] for d in depths],
            "per_exit": per_exit,
        }


@dataclass(frozen=True)
class Generation:
    """An answer, without the caches that it took."""

    tokens: list[int]  # the new ones, up to EOS or the last one that ``Options.stop_at`` allows
    ended: str  # "eos", "stop_at", "length", "context" (the target's is full), or "": it goes on
    stats: Stats
    plan: Plan
    exact: bool  # whether the method is lossless
    prompt_length: int

    def text(self, tokenizer: Any) -> str:
        """The answer as text, by a ``Tokenizer``."""
        stop_at = self.plan.options.stop_at
        return tokenizer.decode(self.tokens) if stop_at is None else stop_at.cut(self.tokens)
