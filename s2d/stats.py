"""What a generation did: its steps, the numbers that they add up to, and the answer."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .options import Options
from .tree import TARGET, Node, Tree


@dataclass
class Step:
    """One pass of the target, and the drafting before it."""

    tree: Tree  # as it was sent
    logits: Tensor  # (N+1, V): row i is what the target says after ``tree.nodes[i]``
    # (T, hidden): the target's last hidden states, before its norm and LM head, of what it has read
    # in this step. The last N+1 are those of the nodes, and in the first step the prompt's are
    # before them.
    hidden: Tensor
    accepted: list[Node]  # a path, up to the answer's end
    tokens: list[int]  # emitted: the path's, and the bonus token, up to the answer's end
    seconds: float = 0.0

    @property
    def sources(self) -> list[int]:
        """By emitted token: the number of the exit that drafted it, or TARGET."""
        drafted = [node.exit_layer for node in self.accepted]
        return drafted + [TARGET] * (len(self.tokens) - len(drafted))


@dataclass
class Stats:
    """What all steps did together. The first pass reads the prompt as well."""

    exits: list[int]  # the numbers of the exits, in the order in which they are asked
    accept_lengths: list[int] = field(default_factory=list)  # tokens emitted in each step
    seconds: float = 0.0
    draft_levels: int = 0  # that were drafted, also those of which no node was sent
    # {exit, or TARGET: its nodes that were sent}
    sent: Counter[int] = field(default_factory=Counter)
    # {(depth, exit): the trees with a sent node there, by this exit}; a level has one exit.
    levels: Counter[tuple[int, int]] = field(default_factory=Counter)
    # And of these, the trees of which such a node was accepted.
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        nodes = step.tree.nodes[1:]
        self.accept_lengths.append(len(step.tokens))
        self.seconds += step.seconds
        self.draft_levels += step.tree.depth
        self.sent.update(node.exit_layer for node in nodes)
        self.levels.update({(node.depth, node.exit_layer) for node in nodes})
        self.accepted.update((node.depth, node.exit_layer) for node in step.accepted)

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

    def acceptance(self) -> dict[str, Any]:
        """What was drafted and accepted, by position and by exit.

        Lists begin with depth 1. A position counts the trees that have a node there. An exit counts
        as asked once for each level that it or a deeper one drafts. Levels of which no node was
        sent do not count. The names are those of vLLM, or like them.
        """
        drafts, accepted = sum_by(0, self.levels), sum_by(0, self.accepted)  # by depth
        drafted_by, right_by = sum_by(1, self.levels), sum_by(1, self.accepted)  # by exit
        per_exit = {}
        for place, exit_layer in enumerate(self.exits):
            per_exit[exit_layer] = {
                "num_asked": sum(drafted_by[deeper] for deeper in self.exits[place:]),
                "num_draft_tokens": self.sent[exit_layer],
                "num_accepted_draft_tokens": right_by[exit_layer],
            }
        depths = sorted(drafts)
        return {
            "num_drafts_per_pos": [drafts[depth] for depth in depths],
            "num_accepted_tokens_per_pos": [accepted[depth] for depth in depths],
            "rates_per_pos": [accepted[depth] / drafts[depth] for depth in depths],
            "per_exit": per_exit,
        }


def sum_by(place: int, counts: Counter[tuple[int, int]]) -> Counter[int]:
    """The sums of ``counts`` of which the keys have the same number at ``place``."""
    found: Counter[int] = Counter()
    for key, count in counts.items():
        found[key[place]] += count
    return found


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
        stop_at = self.options.stop_at
        return tokenizer.decode(self.tokens) if stop_at is None else stop_at.cut(self.tokens)
