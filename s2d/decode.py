"""The draft-verify loop, once, for every method. Knows nothing about files or text.

A step is: draft a tree of tokens, run the target over all of them in one pass, keep the path the verifier accepts and
the one token it adds. Which tree, and from which exits, is a matter of options (options.py).
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.attention import sdpa_kernel

from .draft import SortedDraft
from .model import DECODING_KERNELS
from .options import check, choose_exits, choose_shape, refuse_knobs
from .proposal import Draft, no_draft
from .sampling import Sampler, Sampling, warp
from .tree import Dynamic, KConfig, TokenTree, TreeAttention, ancestor_mask
from .tune import tuner_for
from .verify import follow, verify_sampled, without


@dataclass
class Stats:
    """What a generation did. The first step's target pass reads the prompt; ``seconds`` is wall time without loading."""

    accept_lengths: list[int] = field(
        default_factory=list
    )  # tokens each step emitted, the target's own included
    exit_counts: Counter = field(
        default_factory=Counter
    )  # exit layer -> draft tokens that left there
    draft_forwards: int = (
        0  # how often the draft ran: once for a level, and once more where it then gave up
    )
    draft_levels: int = 0  # depths of all drafts
    accepted: int = 0  # draft tokens that were accepted and emitted; none are after EOS
    draft_seconds: float = 0.0  # of these: growing drafts,
    target_seconds: float = 0.0  # and the target's forward passes
    seconds: float = 0.0

    def count(self, emitted, proposal, accepted, draft_seconds, target_seconds):
        """Add one step, which is one target pass, that emitted so many tokens, so many of them of its Draft."""
        self.accept_lengths.append(emitted)
        for exit_layer, size in zip(proposal.exits, proposal.level_sizes):
            if exit_layer:
                self.exit_counts[exit_layer] += size
        self.draft_forwards += proposal.forwards
        self.draft_levels += len(proposal.exits)
        self.accepted += accepted
        self.draft_seconds += draft_seconds
        self.target_seconds += target_seconds

    @property
    def steps(self):
        return len(self.accept_lengths)

    @property
    def mean_accepted_tokens(self):
        """Tokens emitted per step; 1.0 for autoregressive decoding."""
        return sum(self.accept_lengths) / self.steps

    @property
    def acceptance_rate(self):
        """Accepted draft tokens by depth of the draft (arXiv 2409.10644); 0.0 where nothing was drafted."""
        return self.accepted / self.draft_levels if self.draft_levels else 0.0


@dataclass
class Step:
    """One step as ``on_step`` sees it.

    After ``n`` tokens of context the target gave ``logits`` (N+1, V) for what was proposed; the nodes in ``path`` were accepted, by
    tests for which the numbers ``draws`` were drawn, and ``tokens`` emitted. ``seconds`` are the whole step's, some of them drafting
    and the target's pass.
    """

    n: int
    proposal: Draft
    logits: torch.Tensor
    path: list[int]
    draws: list[torch.Tensor]
    tokens: list[int]
    draft_seconds: float
    target_seconds: float
    seconds: float

    @property
    def sources(self):
        """Where each of ``tokens`` came from: the exit layer that drafted it, or 0 for the target's own."""
        return [*self.proposal.exits[: len(self.path)], 0][: len(self.tokens)]


@dataclass
class Output:
    """``tokens`` are the new ones only, with EOS last if it was produced; ``exact`` tells whether the method is lossless."""

    tokens: list[int]
    exact: bool
    stats: Stats


@torch.inference_mode()
@sdpa_kernel(DECODING_KERNELS)
def generate(
    target, tokens, draft=None, method="s2d", max_new_tokens=128, temperature=0.0, top_p=1.0, seed=0,
    exits=None, thresholds=None, draft_length=None, tree=None, init="draft", stop=None, replacement=False,
    tuner=None, on_tokens=None, on_step=None, share=None,
):  # fmt: skip
    """Continue ``tokens``, a list of ids, as ``target`` alone would. Returns an Output.

    ``exits`` and ``thresholds`` (one for each exit, within 0..1; the last exit always drafts) default to the draft's
    config; "sd" and "mcsd" use the last exit only. "sd" and "s2d" draft chains of ``draft_length`` tokens, "mcsd" and
    "s2d-tree" draft ``tree``: the numbers of children, level by level, such as (4, 2, 2, 1), or a ``Dynamic``. Defaults
    come from the draft's config, for "mcsd" it is K_CONFIG. Above T = 0 the children of a node are sampled, with or
    without ``replacement``; those of a Dynamic are always the likeliest. ``stop`` ends drafting early: a number, where
    the last exit's confidence falls below it, or a decision model (decision.py); for chains it defaults to the draft's
    config, and 0 never ends one.

    "auto" decides all this by itself, from sorted exits, step by step, by a ``tuner`` (tune/), which goes on learning from
    one generation to the next; without one it starts from what came with the draft.

    ``init`` "target" takes the first level of each tree from the target's last distribution (arXiv 2409.10644, "target
    initialized"): every root counts as accepted and the longest path below one wins. This alone is not lossless, unless
    the first level has one node. The first step only finds roots and emits nothing.

    ``on_tokens`` is called with each step's new tokens, ``on_step`` with each Step. ``share``, where several processes run
    one target, gives all of them what the first one decides (parallel.from_rank_0). Ends at EOS, after ``max_new_tokens`` or
    where the target's context is full. Raises ValueError for anything that cannot be run.
    """
    if method == "auto":
        refuse_knobs(thresholds, draft_length, tree, init, stop)
    limit = check(
        target, tokens, draft, method, max_new_tokens, temperature, top_p, seed, init, stop
    )
    shape = choose_shape(target.config, draft and draft.config, method, draft_length, tree)
    if method != "ar":
        exits, thresholds = choose_exits(draft.config, method, exits, thresholds)
    if method != "auto":
        tuner = None
    elif share:
        raise ValueError("method 'auto' is for a target in one process")
    elif tuner is None:
        tuner = tuner_for(generate, target, draft, exits)  # may measure first, which generates too
    elif tuple(tuner.exits) != exits:
        raise ValueError(f"the tuner is for exits {list(tuner.exits)}, not {list(exits)}")
    started = now(target.device)
    sampling = Sampling(temperature, top_p, replacement, Sampler(seed, target.device))
    n, stats, eos = len(tokens), Stats(), set(target.config.eos_token_ids)
    context = torch.zeros(1, limit, dtype=torch.long, device=target.device)
    context[0, :n] = torch.tensor(tokens)
    cache = target.new_cache(limit + shape.size)
    attention = TreeAttention(1, shape.size, target.device, target.dtype)
    if isinstance(shape, KConfig):
        attention.set_tree(ancestor_mask(shape.parents().to(target.device)), shape.chain)
    drafter, after_context = None, None
    if method != "ar":
        if stop is None and method in ("sd", "s2d"):
            stop = draft.config.draft_stop
        drafter, draft_limit = (
            SortedDraft(draft, exits, thresholds, shape, limit, tuner),
            draft.config.max_position_embeddings,
        )
    target_gives_roots = drafter is not None and init == "target"
    roots = None  # if the target gives them, those of the next tree; before its first pass there are none, and no draft

    finished = False
    while not finished:
        began = now(target.device)
        proposal = no_draft(target.device)
        if drafter and (roots or not target_gives_roots):
            room = limit - n if roots else limit - n - 1  # the token the target adds needs room too
            levels = max(1 if roots else 0, min(room, draft_limit - n + 1))
            grow = partial(drafter.grow, context, n, levels, sampling, stop, roots)
            proposal = _first_ones_draft(grow, share, target.device) if share else grow()
        if isinstance(shape, Dynamic):
            attention.set_tree(proposal.tree.ancestors, proposal.tree.chain)
        drafted = now(target.device)
        logits = _score(
            target, context[:, :n], proposal.tree, attention, cache, after_context
        )  # (N+1, V)
        if not logits.sum(dtype=torch.float32).isfinite():
            raise ValueError(
                "the target's logits are no numbers: its weights are damaged, or too large for their dtype"
            )
        scored = now(target.device)
        p = warp(logits, temperature, top_p) if temperature > 0 else None
        verify = partial(_verify, proposal, logits, p, sampling, target_gives_roots)
        path, extra, draws = share(lambda: (*verify()[:2], [])) if share else verify()  # noqa: B023 - used at once
        after_context = logits[path[-1] + 1 if path else 0]  # (V,)
        cache.keep(n, path)
        if drafter and proposal.slots is not None:
            drafter.keep(n, proposal.slots[path].tolist())
        new = proposal.tree.tokens[path].tolist()
        if (
            target_gives_roots
        ):  # the verifier's token waits: it is the first root of the next tree, and may yet lose
            roots = _target_roots(extra, after_context, shape, sampling)
        else:
            new.append(extra)
        context[0, n : n + len(new)] = torch.tensor(new)

        if tuner:
            tuner.learn(
                proposal.slots[path].tolist(),
                new,
                p if p is None else p[[0, *(node + 1 for node in path)]],
            )
        end = next((i for i, token in enumerate(new, 1) if token in eos), None)
        new = new[:end]
        if on_step:
            on_step(
                Step(
                    n,
                    proposal,
                    logits,
                    path,
                    draws,
                    new,
                    drafted - began,
                    scored - drafted,
                    now(target.device) - began,
                )
            )
        n += len(new)
        finished = end is not None or n == limit
        stats.count(len(new), proposal, min(len(path), len(new)), drafted - began, scored - drafted)
        if on_tokens:
            on_tokens(new)
    stats.seconds = now(target.device) - started
    exact = method == "ar" or init == "draft" or shape.width == 1
    return Output(context[0, len(tokens) : n].tolist(), exact, stats)


def _first_ones_draft(grow, share, device):
    """The Draft that the first of several processes grows, on all of them; the others need neither q nor slots."""
    own = []

    def lists():
        own.append(grow())
        draft = own[0]
        return (
            draft.tree.tokens.tolist(),
            draft.tree.parents.tolist(),
            draft.exits,
            draft.level_sizes,
            draft.looks,
        )

    tokens, parents, exits, level_sizes, looks = share(lists)
    if own:
        return own[0]
    tree = TokenTree(
        *(torch.tensor(numbers, dtype=torch.long, device=device) for numbers in (tokens, parents))
    )
    return Draft(tree, None, None, exits, level_sizes, looks=looks)


def now(device):
    """Seconds on a clock, once the device has done all it was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _score(target, context, tree, attention, cache, after_context):
    """One target pass over what its cache lacks of ``context`` (1, n) and ``tree``: logits (N+1, V), see verify.py.

    ``after_context`` (V,) is row 0 where the cache already has the whole context.
    """
    n, seen = context.shape[1], cache.length
    positions, mask = attention.span(n, seen, n + len(tree))
    new = torch.cat((context[:, seen:], tree.tokens[None]), dim=1)
    hidden = target.run_layers(target.embed(new), positions=positions, mask=mask, cache=cache)
    if seen == n:
        return torch.cat((after_context[None], target.logits(hidden[0])))
    return target.logits(hidden[0, n - 1 - seen :])


def _verify(proposal, logits, p, sampling, target_gives_roots):
    """(path, extra, draws) of the verifier that fits, by ``logits`` or, above T = 0, by ``p`` (N+1, V), these as warped.

    A tree whose roots the target gave has one walk a root; the longest wins.
    """
    tree = proposal.tree
    roots = (tree.parents == -1).nonzero().flatten().tolist() if target_gives_roots else []
    starts = roots or [-1]
    if sampling.temperature > 0 and proposal.q is not None:
        walks = [
            verify_sampled(tree, p, proposal.q, sampling.replacement, sampling.sampler, start)
            for start in starts
        ]
    else:
        choices = logits.argmax(dim=-1) if sampling.temperature == 0 else sampling.sampler.draw(p)
        walks = [follow(tree, choices, start) for start in starts]
    path, extra, draws = max(walks, key=lambda walk: len(walk[0]))
    return path, int(extra), draws


def _target_roots(first, logits, shape, sampling):
    """The first level of the next tree: the token ``first`` and the target's next best, or next drawn, after the context.

    Returns tokens (K,) and their log-probabilities (K,) by the target's ``logits`` (V,).
    """
    tokens, probs = (
        torch.tensor([first], device=logits.device),
        warp(logits, sampling.temperature or 1.0, sampling.top_p),
    )
    if shape.width > 1:
        rest = without(probs, tokens[0])
        if sampling.temperature > 0:
            others = sampling.sampler.candidates(rest[None], shape.width - 1, replacement=False)[0]
        else:
            others = rest.topk(shape.width - 1).indices
        tokens = torch.cat(
            (tokens, others.where(rest[others] > 0, first))
        )  # a token without a chance is no root
    return tokens, probs[tokens].log()
