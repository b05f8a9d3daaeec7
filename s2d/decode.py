"""The loop of speculative decoding, once, for every method: draft, verify, roll back.

``decode`` yields one Step per target pass. A ``Decoder`` has a step's two phases, before and after
that pass; many prompts share a pass between the phases of each (extras/many.py).
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .tree import KConfig, Tree, positions_and_mask
from .verify import verify

PREFILL = 256  # with more positions to read, a step drafts nothing: masks would grow with T squared


@dataclass
class Step:
    """One pass of the target, and the drafting before it."""

    tree: Tree
    logits: Tensor  # (N+1, V): after the context, and after each node of ``tree.sent``
    path: list[int]  # the accepted nodes, by place in ``tree.sent``
    tokens: list[int]  # emitted: theirs and the bonus token, up to EOS
    draft_seconds: float
    target_seconds: float
    seconds: float


@dataclass
class Stats:
    """What a generation did, added up over its steps. The first pass reads the prompt."""

    accept_lengths: list[int] = field(default_factory=list)  # tokens emitted per step
    exit_counts: Counter = field(default_factory=Counter)  # exit layer -> draft tokens from there
    draft_forwards: int = 0  # levels that were drafted
    accepted: int = 0  # draft tokens that were emitted
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, step: Step):
        tree = step.tree
        exits = [tree.exits[node] for node in tree.sent]
        self.accept_lengths.append(len(step.tokens))
        self.exit_counts.update(exit for exit in exits if exit is not None)
        self.draft_forwards += tree.level
        self.accepted += min(len(step.path), len(step.tokens))
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
        return self.accepted / max(1, self.draft_forwards)


class Decoder:
    """One generation: iterating over it decodes, a Step at a time.

    ``context`` grows until it has ``limit`` tokens or ends with EOS. ``draft``: a SortedDraft, or
    None for plain decoding; ``sampling``: a Sampling.
    """

    exact = True  # the output follows the target's distribution

    def __init__(self, target, draft, context: list[int], limit: int, sampling):
        self.target, self.drafter, self.sampling = target, draft, sampling
        self.options = sampling.options  # with defaults filled in
        self.context, self.limit = list(context), limit
        self.prompt_length = len(self.context)
        self.cache = target.new_cache(limit + (draft.shape.max_nodes if draft else 0))
        self.ended = ""  # or why: "eos", "length", or "context" where the target's is full
        self.stats = Stats()

    @property
    def tokens(self) -> list[int]:
        """The new ones so far, with EOS last if it was produced."""
        return self.context[self.prompt_length :]

    def __iter__(self) -> Iterator[Step]:
        while not self.ended:
            with torch.inference_mode():  # but not the caller's code between steps
                logits = self.target(**self.draft())[0]  # (N+1, V)
                step = self.accept(logits)
            yield step

    def draft(self) -> dict:
        """The first phase: draft a tree. Returns the target's input, arguments of its forward."""
        self.began = time.perf_counter()
        # 1. Draft a tree of tokens; an empty one is plain decoding.
        self.tree = self.draft_tree()
        self.drafted = time.perf_counter()
        # 2. One target pass over the nodes, behind what it has not seen of the context.
        seen, n, ancestors = self.cache.length, len(self.context), self.tree.shape.ancestors
        tokens, parents = self.tree.part(self.tree.sent)
        positions, mask = positions_and_mask(seen, n, parents, self.target, ancestors)
        tokens = torch.tensor([self.context[seen:] + tokens], device=self.target.device)  # (1, T)
        last = 1 + len(parents)
        return dict(tokens=tokens, last=last, positions=positions, mask=mask, cache=self.cache)

    def draft_tree(self) -> Tree:
        n, draft = len(self.context), self.drafter
        if draft is None or n - self.cache.length > PREFILL:
            return Tree(self.context, KConfig(()), max_levels=0)
        # With room for the bonus token, and inside the draft's own context, which may be shorter.
        levels = min(self.limit - n - 1, draft.max_positions - n + 1)
        tree = Tree(self.context, draft.shape, levels, draft.min_prob)
        draft.grow(tree, self.sampling)
        return tree

    def accept(self, logits: Tensor) -> Step:
        """The second phase, by the target's ``logits`` (N+1, V): verify, roll back, emit."""
        if not logits.sum(dtype=torch.float32).isfinite():  # on a GPU this waits for the pass
            raise ValueError("the target's logits are not finite: damaged weights, or overflow")
        scored = time.perf_counter()
        # 3. Accept a path, and add the bonus token, the target's own after it.
        path, tokens = self.verify(logits)
        # 4. Roll both models' KV caches back to what was accepted.
        self.cache.keep(len(self.context), path)
        if self.drafter is not None:
            self.drafter.keep(self.tree, path)
        tokens = self.emit(tokens)
        step = Step(
            self.tree,
            logits,
            path,
            tokens,
            draft_seconds=self.drafted - self.began,
            target_seconds=scored - self.drafted,
            seconds=time.perf_counter() - self.began,
        )
        self.stats.add(step)
        if self.ended:  # free the memory: the caller may keep this object
            self.cache = self.drafter = None
        return step

    def verify(self, logits: Tensor) -> tuple[list[int], list[int]]:
        """The accepted path, and its tokens with the bonus token."""
        tokens, parents = self.tree.part(self.tree.sent)
        q = torch.cat(self.tree.q) if self.tree.q else None
        path, bonus = verify(len(self.context), tokens, parents, q, logits, self.sampling)
        return path, [*(tokens[i] for i in path), bonus]

    def emit(self, tokens: list[int]) -> list[int]:
        """Append ``tokens`` to the context, up to EOS."""
        for i, token in enumerate(tokens):
            if token in self.target.config.eos_token_ids:
                tokens = tokens[: i + 1]
                self.ended = "eos"
                break
        self.context = self.context + tokens  # a new list: trees keep the former one
        if not self.ended and len(self.context) >= self.limit:
            full = len(self.context) == self.target.config.max_position_embeddings
            self.ended = "context" if full else "length"
        return tokens


def decode(target, draft, context: list[int], limit: int, sampling) -> Iterator[Step]:
    """Continue ``context`` as ``target`` alone would, up to ``limit`` tokens; see Decoder."""
    yield from Decoder(target, draft, context, limit, sampling)
