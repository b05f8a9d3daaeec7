"""The loop of speculative decoding, whatever drafts: draft, one target pass, verify, roll back.

A ``Decoder`` is one generation, and ``Decoder.__iter__`` is the algorithm. The top of tree.py
explains nodes and rows.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .devices import to_device
from .draft import SortedDraft
from .mask import MAX_UNREAD, positions_and_mask
from .model import LlamaConfig
from .options import Settings
from .rules import Rule
from .tree import Tree, empty_tree


class TargetCache(Protocol):
    """What a Decoder needs of a target's KV cache."""

    length: int  # the number of positions that it holds

    def keep(self, n: int, offsets: list[int]) -> None:
        """Roll back to the first ``n`` entries and those at n + i for i in ``offsets``."""


class Target(Protocol):
    """What a Decoder needs of the model whose text is written: a ``Llama``, for example."""

    config: LlamaConfig
    device: torch.device
    dtype: torch.dtype

    def new_cache(self, capacity: int) -> TargetCache:
        """An empty KV cache."""

    def __call__(
        self,
        tokens: Tensor,
        last: int,
        positions: Tensor | None,
        mask: Tensor | None,
        cache: TargetCache,
    ) -> Tensor:
        """Tokens (1, T) after those in the cache -> logits (1, last, V); see ``Llama.forward``."""


@dataclass
class Inputs:
    """What a target's pass reads: the rest of the context, and a tree."""

    tokens: Tensor  # (1, T)
    last: int  # the logits of so many last positions are needed
    positions: Tensor | None  # (T,)
    mask: Tensor | None  # (T, S+T)


@dataclass
class Step:
    """One pass of the target, and the drafting before it."""

    tree: Tree
    logits: Tensor  # (N+1, V): after the context, and after each node of the tree
    accepted: list[int]  # the nodes of a path, up to the answer's end
    tokens: list[int]  # emitted: the path's and, unless it has EOS, the target's own after it
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
    """What a generation did, added up over its steps. The first pass reads the prompt."""

    accept_lengths: list[int] = field(default_factory=list)  # tokens emitted per step
    exit_counts: Counter[int] = field(default_factory=Counter)  # exit -> its tokens that were sent
    exit_levels: Counter[int] = field(default_factory=Counter)  # exit -> its levels that were sent
    exit_accepted: Counter[int] = field(default_factory=Counter)  # exit -> its accepted tokens
    draft_levels: int = 0  # levels of the trees, roots from the target included
    draft_tokens: int = 0  # nodes that were sent, roots from the target included
    accepted_tokens: int = 0  # tokens of the trees that were emitted, roots included
    depth_sent: Counter[int] = field(default_factory=Counter)  # depth -> trees with a node there
    depth_accepted: Counter[int] = field(default_factory=Counter)  # depth -> accepted nodes
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        self.accept_lengths.append(len(step.tokens))
        self.exit_counts.update(each for each in step.tree.exit_layers if each is not None)
        levels = dict(zip(step.tree.depths, step.tree.exit_layers))  # {depth: exit} of those sent
        self.exit_levels.update(each for each in levels.values() if each is not None)
        self.exit_accepted.update(each for each in step.sources if each is not None)
        self.draft_levels += step.tree.level_count
        self.draft_tokens += len(step.tree.tokens)
        self.accepted_tokens += len(step.accepted)
        self.depth_sent.update(levels.keys())
        self.depth_accepted.update(range(len(step.accepted)))
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

    tokens: list[int]  # the new ones only, up to EOS or the one that completes a stop string
    ended: str  # "eos", "stop_at", "length", "context" (the target's is full), or "": it goes on
    stats: Stats
    settings: Settings
    exact: bool  # whether the method is lossless
    prompt_length: int

    def text(self, tokenizer: Any) -> str:
        """The answer as text, by a ``Tokenizer``; it ends before a stop string."""
        text = tokenizer.decode(self.tokens)
        stop_at = self.settings.stop_at
        return text if stop_at is None else stop_at.cut(text)


class Decoder:
    """One generation: iterating over it decodes, a Step at a time.

    Args:
        target: the model whose text is written.
        drafter: what drafts; None is plain decoding.
        rule: how tokens are proposed and accepted.
        context: the ids of the prompt.
        limit: the context's length at which decoding ends.
        settings: what the other arguments were made from.
    """

    def __init__(
        self,
        target: Target,
        drafter: SortedDraft | None,
        rule: Rule,
        context: list[int],
        limit: int,
        settings: Settings,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.rule = rule
        self.context = context
        self.limit = limit
        self.settings = settings
        self.prompt_length = len(context)
        self.ended = ""  # why it has ended, see ``Generation``
        self.is_last = None if settings.stop_at is None else settings.stop_at.begin()
        self.stats = Stats()
        self.cache = target.new_cache(limit + (0 if drafter is None else drafter.shape.capacity))
        # When the step began, was drafted, and had its logits, by ``time.perf_counter``.
        self.began_at = 0.0
        self.drafted_at = 0.0
        self.scored_at = 0.0

    def __iter__(self) -> Iterator[Step]:
        while not self.ended:
            with inference(self.target.device):  # not during the yield, when the caller's code runs
                tree = self.draft()  # 1. draft a tree of tokens; an empty one is plain decoding
                logits = self.run_target(tree)  # 2. one target pass over it: (N+1, V)
                step = self.accept(tree, logits)  # 3. verify it, 4. roll back, 5. emit tokens
            yield step

    def draft(self) -> Tree:
        """Draft a tree of tokens that may follow the context."""
        self.began_at = time.perf_counter()
        tree = self.make_tree()
        self.drafted_at = time.perf_counter()
        return tree

    def make_tree(self) -> Tree:
        n = len(self.context)
        if self.drafter is None or n - self.cache.length > MAX_UNREAD:  # plain decoding, or prefill
            return empty_tree(self.context)
        # One position is for the bonus token. The draft model may have fewer positions than the
        # target, but never reads the last level, hence + 1. If no level is left, nothing is
        # drafted.
        levels = min(self.limit - n - 1, self.drafter.max_positions - n + 1)
        tree = self.drafter.new_tree(self.context, levels)
        self.drafter.grow(tree, self.rule)
        return tree

    def run_target(self, tree: Tree) -> Tensor:
        """The target's logits (N+1, V) after the context and after each node of ``tree``.

        Those after the context are missing if the target has read all of it (roots.py).
        """
        inputs = self.inputs(tree)
        return self.target(
            tokens=inputs.tokens,
            last=inputs.last,
            positions=inputs.positions,
            mask=inputs.mask,
            cache=self.cache,
        )[0]

    def inputs(self, tree: Tree) -> Inputs:
        """What the target has not read: the rest of the context, then the tree."""
        read = self.cache.length
        n = len(self.context)
        device = self.target.device
        positions, mask = positions_and_mask(
            read, n, tree.parents, device, self.target.dtype, tree.shape.ancestors
        )
        tokens = self.context[read:] + tree.tokens  # (T,)
        # After the context's last token, unless it was read before (roots.py), and after each node.
        last = min(1 + len(tree.tokens), len(tokens))
        return Inputs(to_device([tokens], device), last, positions, mask)

    def accept(self, tree: Tree, logits: Tensor) -> Step:
        """Accept a path of ``tree``, by the target's ``logits`` (N+1, V), and emit its tokens."""
        check_finite(logits)  # a GPU is waited for here
        self.scored_at = time.perf_counter()
        # 3. Verify: which path of the tree is accepted, and the target's own token after it.
        accepted, bonus = self.verify(tree, logits)
        # 4. Roll back: both models forget what was not accepted.
        self.roll_back(tree, accepted)
        # 5. Emit: the tokens of the path and the bonus token, up to the answer's end.
        tokens = [tree.tokens[node] for node in accepted]
        return self.emit(tree, logits, accepted, [*tokens, bonus])

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        """The accepted nodes of ``tree``, and the bonus token; see ``Rule.verify``."""
        return self.rule.verify(tree, logits)

    def roll_back(self, tree: Tree, accepted: list[int]) -> None:
        """Keep the context and the ``accepted`` nodes in the caches of target and draft."""
        # In the target's cache, nodes follow the context in the order of their numbers.
        self.cache.keep(len(self.context), accepted)
        if self.drafter is not None:
            self.drafter.keep(tree, accepted)

    def emit(self, tree: Tree, logits: Tensor, accepted: list[int], tokens: list[int]) -> Step:
        """Append ``tokens``, up to the answer's last, to the context, and make a Step of all this.

        The last is EOS, or the one that completes a stop string.
        """
        for count, token in enumerate(tokens, start=1):
            if token in self.target.config.eos_token_ids:
                self.ended = "eos"
            elif self.is_last is not None and self.is_last(token):
                self.ended = "stop_at"
            if self.ended:
                accepted = accepted[:count]
                tokens = tokens[:count]
                break
        self.context = self.context + tokens  # a new list: trees keep the old one
        if not self.ended and len(self.context) >= self.limit:
            full = len(self.context) == self.target.config.max_position_embeddings
            self.ended = "context" if full else "length"
        step = Step(
            tree,
            logits,
            accepted,
            tokens,
            draft_seconds=self.drafted_at - self.began_at,
            target_seconds=self.scored_at - self.drafted_at,
            seconds=time.perf_counter() - self.began_at,
        )
        self.stats.add(step)
        return step

    @property
    def tokens(self) -> list[int]:
        """The new ones so far, with EOS last if it was produced."""
        return self.context[self.prompt_length :]

    def run(self) -> Generation:
        """Decode to the end."""
        for _ in self:
            pass
        return self.result()

    def result(self) -> Generation:
        """The answer so far, without the caches and whatever else decoding takes."""
        return Generation(
            tokens=self.tokens,
            ended=self.ended,
            stats=self.stats,
            settings=self.settings,
            exact=self.rule.exact,
            prompt_length=self.prompt_length,
        )


@contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """Nothing is kept for gradients. On a GPU, attention is not cuDNN's.

    cuDNN plans for tens of milliseconds for each new length, and in decoding every length is new.
    """
    with torch.inference_mode():
        if device.type != "cuda":
            yield
            return
        others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(others):
            yield


def check_finite(logits: Tensor) -> None:
    if not logits.sum(dtype=torch.float32).isfinite():
        raise ValueError("the target's logits are not finite: damaged weights, or overflow")
