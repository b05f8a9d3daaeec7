"""The draft-verify loop, once, for every method: ``decode`` yields a Step a pass of the target.

Knows nothing about files, text or the names of methods. A target, a drafter (draft.py's ``NoDraft``
says what that is) and a Sampling are all it works with.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import torch
from torch.nn.attention import sdpa_kernel

from .cache import KVCache
from .model import DECODING_KERNELS
from .proposal import TARGET, Proposal
from .tree import TreeAttention
from .verify import Verdict


@dataclass
class Step:
    """One pass of the target, and the drafting before it."""

    n: int  # tokens of context before it
    proposal: Proposal
    logits: torch.Tensor  # (N+1, V), the target's
    verdict: Verdict
    tokens: list[int]  # that were emitted: those of the verdict up to EOS
    draft_seconds: float
    target_seconds: float  # of the pass
    seconds: float  # of the whole step

    @property
    def sources(self) -> list[int]:
        """For each of ``tokens`` the exit that drafted it, TARGET for the target's own."""
        exits = self.proposal.exits
        return [*(exits[node] for node in self.verdict.path), TARGET][: len(self.tokens)]


@dataclass
class Stats:
    """What a generation did: a fold over its steps. The first target pass reads the prompt."""

    accept_lengths: list[int] = field(default_factory=list)  # emitted tokens of each step
    exit_counts: Counter = field(default_factory=Counter)  # exit -> draft tokens that left there
    draft_forwards: int = 0  # rounds: passes of the draft's layers, or questions to its table
    draft_levels: int = 0  # depths of all proposals
    accepted: int = 0  # draft tokens that were accepted and emitted; none after EOS
    root_levels: int = 0  # of these depths; the target gave them, a root of each is emitted
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, step: Step):
        proposal, exits = step.proposal, step.proposal.exits
        roots = TARGET in exits
        self.accept_lengths.append(len(step.tokens))
        self.exit_counts.update(exit_layer for exit_layer in exits if exit_layer != TARGET)
        self.draft_forwards += len(proposal.confidences)
        self.draft_levels += proposal.depth
        self.accepted += min(len(step.verdict.path), len(step.tokens)) - roots
        self.root_levels += roots
        self.draft_seconds += step.draft_seconds
        self.target_seconds += step.target_seconds
        self.seconds += step.seconds

    @property
    def steps(self) -> int:
        return len(self.accept_lengths)

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens emitted a step (MAT), the bonus token included; 1.0 without a draft."""
        return sum(self.accept_lengths) / max(1, self.steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens by levels that the draft gave; 0.0 without a draft."""
        return self.accepted / max(1, self.draft_levels - self.root_levels)

    @property
    def published_acceptance_rate(self) -> float:
        """The same with the target's own roots, as arXiv 2409.10644 counts."""
        return (self.accepted + self.root_levels) / max(1, self.draft_levels)


def decode(target, tokens, drafter, sampling, limit) -> Iterator[Step]:
    """Continue ``tokens``, a list or 1-D tensor of ids, as ``target`` alone would, step by Step.

    Ends after EOS, or where there are ``limit`` tokens, the prompt's included.
    """
    context = checked_list(tokens, "the prompt's ids", int, 0, target.config.vocab_size - 1)
    checked(limit, "limit", int, 1, target.config.max_position_embeddings)
    scorer = Scorer(target, limit, drafter.shape)
    return steps_of(target, new_loop(context, scorer, drafter, sampling, limit))


def new_loop(context, scorer, drafter, sampling, limit):
    """The loop of ``decode``, but who runs it also runs its passes (extras/many.py: of several).

    It yields a Pass and a Step in turn: ``next`` asks for the Pass, ``send`` takes its logits.
    """
    while len(context) < limit:
        step = yield from decode_step(context, scorer, drafter, sampling, limit)
        context += step.tokens
        yield step
        if step.tokens and step.tokens[-1] in scorer.target.config.eos_token_ids:
            return


def steps_of(target, loop) -> Iterator[Step]:
    """The Steps of one loop by itself."""
    while True:
        with torch.inference_mode(), sdpa_kernel(DECODING_KERNELS):  # not where a Step is used
            wanted = next(loop, None)
            step = wanted and loop.send(run_pass(target, wanted))
        if not step:
            return
        yield step


def decode_step(context, scorer, drafter, sampling, limit) -> Iterator["Pass"]:
    """One Step behind ``context``, a list: yields a Pass, is sent its logits, returns the Step."""
    n, device = len(context), scorer.target.device
    began = clock(device)
    # 1. Draft a tree of tokens; an empty one is plain decoding.
    proposal = drafter.propose(context, limit - n, sampling)
    drafted = clock(device)
    # 2. One target pass: row 0 is about what follows the context, row i + 1 what follows node i.
    logits = scorer.rows((yield scorer.wanted(context, proposal.tree)))  # (N+1, V)
    scored = clock(device)
    # 3. Accept a path and add the bonus token, the target's own after it.
    verdict = drafter.verify(n, proposal, logits, sampling)
    # 4. Roll both models' KV caches back to what was accepted.
    scorer.keep(n, verdict.path)
    drafter.keep(n, proposal, verdict, logits)
    tokens = up_to_eos(verdict.tokens, scorer.target.config.eos_token_ids)
    times = drafted - began, scored - drafted, clock(device) - began
    return Step(n, proposal, logits, verdict, tokens, *times)


@dataclass
class Pass:
    """What the target is to run: T new positions behind a KV cache."""

    tokens: torch.Tensor  # (T,)
    positions: torch.Tensor | None  # these two as ``run_layers`` takes them
    mask: torch.Tensor | None
    cache: KVCache
    first: int  # logits are wanted from this row on


def run_pass(target, wanted):
    """A Pass by itself: its logits (T - first, V)."""
    how = dict(positions=wanted.positions, mask=wanted.mask, cache=wanted.cache)
    hidden = target.run_layers(target.embed(wanted.tokens[None]), **how)
    return target.logits(hidden[0, wanted.first :])


class Scorer:
    """The target's KV cache, for contexts of at most ``limit`` tokens and one tree shape."""

    def __init__(self, target, limit, shape):
        self.target, self.fixed = target, shape.fixed
        self.cache = target.new_cache(limit + shape.size)
        self.attention = TreeAttention(shape.parents().to(target.device), target.dtype)
        self.latest = None  # logits (N+1, V) of the last pass,
        self.after_context = None  # and their row (V,) after the path that was accepted

    def wanted(self, context, tree) -> Pass:
        """The Pass over ``tree`` and what the KV cache lacks of ``context``."""
        n, seen = len(context), self.cache.length
        if not self.fixed:
            self.attention = TreeAttention(tree.parents, self.target.dtype)
        positions, mask = self.attention.span(n, seen, n + len(tree))
        new = torch.tensor(context[seen:], dtype=torch.long, device=self.target.device)
        # Nothing is new in front of the tree where the last step gave no bonus token: then the row
        # after the context is known already.
        self.latest = self.after_context[None] if seen == n else None
        tokens, first = torch.cat((new, tree.tokens)), max(0, n - 1 - seen)
        return Pass(tokens, positions, mask, self.cache, first)

    def rows(self, logits):
        """(N+1, V), of the ``logits`` of the Pass that was wanted."""
        if not logits.sum(dtype=torch.float32).isfinite():
            raise ValueError("the target's logits are NaN: its weights are damaged, or overflow")
        self.latest = logits if self.latest is None else torch.cat((self.latest, logits))
        return self.latest

    def keep(self, n, path):
        """Roll back to the n positions of context and the accepted ``path`` behind them."""
        self.cache.keep(n, path)
        self.after_context = self.latest[path[-1] + 1 if path else 0]


def checked_list(values, what, *how):
    """``values``, a sequence or a one-dimensional tensor or array, as a list; see ``checked``."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or not values:
        raise ValueError(f"{what}: expected a list with at least one, got {values!r:.60}")
    return [checked(value, what, *how) for value in values]


def checked(value, what, kind, low, high=2**63 - 1):
    """``value`` as a ``kind``, int or float; ValueError where it is none within low..high."""
    known = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not (known and low <= value <= high):
        expected = f"a {'whole ' if kind is int else ''}number from {low} to {high}"
        raise ValueError(f"{what}: expected {expected}, got {value!r:.60}")
    return kind(value)


def up_to_eos(tokens, eos_token_ids):
    """``tokens`` (a list) up to the first EOS, with it.

    >>> up_to_eos([5, 2, 7], (2,))
    [5, 2]
    """
    ends = [i for i, token in enumerate(tokens, 1) if token in eos_token_ids]
    return tokens[: ends[0]] if ends else tokens


def clock(device) -> float:
    """Seconds on a clock, once the device has done all it was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
