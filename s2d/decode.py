"""The draft-verify loop, once, for every method. Knows nothing about files or text.

A step is: draft a tree of tokens, run the target over all of them in one pass, keep the path the verifier accepts and
the one token it adds. A method is a choice of options: ``ar`` drafts nothing, ``sd`` and ``s2d`` a chain from one exit
or from sorted exits, ``mcsd`` and ``s2d-tree`` the same with several candidates for a place.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.attention import sdpa_kernel

from .draft import Draft, SortedDraft, no_draft
from .model import DECODING_KERNELS
from .sampling import Sampler, Sampling, warp
from .tree import Dynamic, KConfig, TokenTree, TreeAttention, ancestor_mask
from .verify import follow, verify_sampled, without

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree")
TREE_METHODS = ("mcsd", "s2d-tree")
K_CONFIG = (4, 2, 2, 1)
LARGEST_TREE = 2048  # nodes drafted for one pass: who looks at whom takes this number squared
SMALLEST_TEMPERATURE = 1e-6  # below it logits divided by it might not be finite; 0 is greedy


@dataclass
class Stats:
    """What a generation did. The first step's target pass reads the prompt; ``seconds`` is wall time without loading."""

    accept_lengths: list[int] = field(default_factory=list)  # tokens each step emitted, the target's own included
    exit_counts: Counter = field(default_factory=Counter)  # exit layer -> draft tokens that left there
    draft_forwards: int = 0  # how often the draft ran: once for each level it drafted
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
    on_tokens=None, on_step=None, share=None,
):  # fmt: skip
    """Continue ``tokens``, a list of ids, as ``target`` alone would. Returns an Output.

    ``exits`` and ``thresholds`` (one for each exit, within 0..1; the last exit always drafts) default to the draft's
    config; "sd" and "mcsd" use the last exit only. "sd" and "s2d" draft chains of ``draft_length`` tokens, "mcsd" and
    "s2d-tree" draft ``tree``: the numbers of children, level by level, such as (4, 2, 2, 1), or a ``Dynamic``. Defaults
    come from the draft's config, for "mcsd" it is K_CONFIG. Above T = 0 the children of a node are sampled, with or
    without ``replacement``; those of a Dynamic are always the likeliest. ``stop`` ends drafting early: a number, where
    the last exit's confidence falls below it, or a decision model (decision.py); for chains it defaults to the draft's
    config, and 0 never ends one.

    ``init`` "target" takes the first level of each tree from the target's last distribution (arXiv 2409.10644, "target
    initialized"): every root counts as accepted and the longest path below one wins. This alone is not lossless, unless
    the first level has one node. The first step only finds roots and emits nothing.

    ``on_tokens`` is called with each step's new tokens, ``on_step`` with each step's Draft and the target's logits
    (N+1, V). ``share``, where several processes run one target, gives all of them what the first one decides
    (parallel.from_rank_0). Ends at EOS, after ``max_new_tokens`` or where the target's context is full. Raises ValueError
    for anything that cannot be run.
    """
    started = now(target.device)
    limit = _check(target, tokens, draft, method, max_new_tokens, temperature, top_p, seed, init, stop)
    shape = choose_shape(target.config, draft and draft.config, method, draft_length, tree)
    sampling = Sampling(temperature, top_p, replacement, Sampler(seed, target.device))
    n, stats, eos = len(tokens), Stats(), set(target.config.eos_token_ids)
    context = torch.zeros(1, limit, dtype=torch.long, device=target.device)
    context[0, :n] = torch.tensor(tokens)
    cache = target.new_cache(limit + shape.size)
    attention = TreeAttention(1, shape.size, target.device, target.dtype)
    if isinstance(shape, KConfig):
        attention.set_tree(ancestor_mask(shape.parents().to(target.device)), shape.chain)
    drafter = roots = after_context = None
    if method != "ar":
        exits, thresholds = choose_exits(draft.config, method, exits, thresholds)
        if stop is None and method not in TREE_METHODS:
            stop = draft.config.draft_stop
        drafter, draft_limit = SortedDraft(draft, exits, thresholds, shape, limit), draft.config.max_position_embeddings
    target_gives_roots = drafter is not None and init == "target"

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
            attention.set_tree(proposal.tree.ancestors)
        drafted = now(target.device)
        logits = _score(target, context[:, :n], proposal.tree, attention, cache, after_context)  # (N+1, V)
        if not logits.sum(dtype=torch.float32).isfinite():
            raise ValueError("the target's logits are no numbers: its weights are damaged, or too large for their dtype")
        scored = now(target.device)
        verify = partial(_verify, proposal, logits, sampling, target_gives_roots)
        path, extra = share(verify) if share else verify()
        after_context = logits[path[-1] + 1 if path else 0]  # (V,)
        cache.keep(n, path)
        if drafter and proposal.slots is not None:
            drafter.keep(n, proposal.slots[path].tolist())
        new = proposal.tree.tokens[path].tolist()
        if target_gives_roots:
            roots = _target_roots(extra, after_context, shape, sampling)
        else:
            new.append(extra)
        context[0, n : n + len(new)] = torch.tensor(new)

        if on_step:
            on_step(proposal, logits)
        end = next((i for i, token in enumerate(new, 1) if token in eos), None)
        new = new[:end]
        n += len(new)
        finished = end is not None or n == limit
        stats.count(len(new), proposal, min(len(path), len(new)), drafted - began, scored - drafted)
        if on_tokens:
            on_tokens(new)
    stats.seconds = now(target.device) - started
    exact = method == "ar" or init == "draft" or shape.width == 1
    return Output(context[0, len(tokens) : n].tolist(), exact, stats)


def _first_ones_draft(grow, share, device):
    """The Draft that the first of several processes grows, on all of them; the others need neither probs nor slots."""
    own = []

    def lists():
        own.append(grow())
        draft = own[0]
        return draft.tree.tokens.tolist(), draft.tree.parents.tolist(), draft.exits, draft.level_sizes, draft.forwards

    tokens, parents, *rest = share(lists)
    if own:
        return own[0]
    tree = TokenTree(*(torch.tensor(numbers, dtype=torch.long, device=device) for numbers in (tokens, parents)))
    return Draft(tree, None, None, *rest)


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


def _verify(proposal, logits, sampling, target_gives_roots):
    """(path, extra) of the verifier that fits. A tree whose roots the target gave has one walk a root; the longest wins."""
    tree = proposal.tree
    roots = (tree.parents == -1).nonzero().flatten().tolist() if target_gives_roots else []
    starts = roots or [-1]
    if sampling.temperature > 0:
        p = warp(logits, sampling.temperature, sampling.top_p)
    if sampling.temperature > 0 and proposal.probs is not None:
        walks = [verify_sampled(tree, p, proposal.probs, sampling.replacement, sampling.sampler, start) for start in starts]
    else:
        choices = logits.argmax(dim=-1) if sampling.temperature == 0 else sampling.sampler.draw(p)
        walks = [follow(tree, choices, start) for start in starts]
    path, extra = max(walks, key=lambda walk: len(walk[0]))
    return path, int(extra)


def _target_roots(first, logits, shape, sampling):
    """The first level of the next tree: the token ``first`` and the target's next best, or next drawn, after the context.

    Returns tokens (K,) and their log-probabilities (K,) by the target's ``logits`` (V,).
    """
    tokens, probs = torch.tensor([first], device=logits.device), warp(logits, sampling.temperature or 1.0, sampling.top_p)
    if shape.width > 1:
        rest = without(probs, tokens[0])
        if sampling.temperature > 0:
            others = sampling.sampler.candidates(rest[None], shape.width - 1, replacement=False)[0]
        else:
            others = rest.topk(shape.width - 1).indices
        tokens = torch.cat((tokens, others.where(rest[others] > 0, first)))  # a token without a chance is no root
    return tokens, probs[tokens].log()


def choose_shape(target_config, draft_config, method, draft_length=None, tree=None):
    """The shape of tree a method drafts; raises ValueError where the options do not fit the method or the target."""
    if tree is not None and method not in TREE_METHODS:
        raise ValueError(f"method {method!r} drafts no tree; use {' or '.join(map(repr, TREE_METHODS))} for one")
    if method == "ar":
        return KConfig(())
    context_size = target_config.max_position_embeddings
    if method in TREE_METHODS:
        if draft_length is not None:
            raise ValueError(f"method {method!r} drafts a tree; give its shape, not a draft length")
        if tree is None:
            tree = K_CONFIG if method == "mcsd" else Dynamic(*draft_config.draft_tree)
        shape = tree if isinstance(tree, Dynamic) else KConfig(tuple(tree))
    else:
        length = draft_config.draft_length if draft_length is None else draft_length
        _check_size(length, length, context_size)  # before a shape of any length is built
        shape = KConfig((1,) * length)
    static = isinstance(shape, KConfig)
    if min(shape.widths if static else (shape.top_k, shape.depth, shape.size), default=0) < 1:
        raise ValueError(f"a draft needs whole numbers of at least 1, got {draft_length=}, {tree=}")
    widest = max(shape.widths) if static else shape.top_k
    if widest > target_config.vocab_size:
        raise ValueError(f"a node cannot have {widest} different children: there are {target_config.vocab_size} tokens")
    _check_size(shape.size, shape.depth, context_size)
    if not static and shape.top_k * shape.depth > LARGEST_TREE:
        raise ValueError(f"a tree {shape.top_k} wide and {shape.depth} deep grows beyond {LARGEST_TREE} nodes")
    return shape


def _check_size(size, depth, context_size):
    for largest, what in ((context_size, "the target's context of"), (LARGEST_TREE, "a draft may have,")):
        if max(size, depth) > largest:
            raise ValueError(f"a tree of {size} nodes, {depth} deep, is more than {what} {largest}")


def choose_exits(config, method, exits=None, thresholds=None):
    """The exits and thresholds a method uses with a draft; raises ValueError where they do not fit it."""
    depth = config.num_hidden_layers
    chosen = tuple(exits) if exits is not None else config.exit_layers or (depth,)
    if method in ("sd", "mcsd") and exits is None:
        chosen = chosen[-1:]
    if method in ("sd", "mcsd") and len(chosen) != 1:
        raise ValueError(f"method {method!r} drafts from one exit, got {list(chosen)}; 's2d' takes several")
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 1 or chosen[-1] > depth:
        raise ValueError(f"exits must increase and lie within the draft's {depth} layers, got {list(chosen)}")
    if thresholds is None:
        known = dict(zip(config.exit_layers, config.thresholds))
        thresholds = [known.get(exit_layer, 0.5) for exit_layer in chosen[:-1]] + [0.0]
    if len(thresholds) != len(chosen):
        raise ValueError(f"{len(chosen)} exits {list(chosen)} need as many thresholds, got {len(thresholds)}")
    if not all(0.0 <= threshold <= 1.0 for threshold in thresholds):
        raise ValueError(f"thresholds are probabilities within 0..1, got {list(thresholds)}")
    return chosen, tuple(thresholds)


def _check(target, tokens, draft, method, max_new_tokens, temperature, top_p, seed, init, stop):
    """Refuse what cannot be run, in one clear line; returns the length at which generation must end."""
    context_size, vocab_size = target.config.max_position_embeddings, target.config.vocab_size
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; expected one of {', '.join(METHODS)}")
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"the prompt has token ids outside the target's vocabulary of {vocab_size}")
    if len(tokens) >= context_size:
        raise ValueError(f"the prompt has {len(tokens)} tokens; the target's context of {context_size} has no room left")
    if max_new_tokens < 1:
        raise ValueError(f"lengths must be at least 1, got max_new_tokens={max_new_tokens}")
    if not (temperature == 0.0 or SMALLEST_TEMPERATURE <= temperature < float("inf")):
        raise ValueError(f"temperature must be 0 or more, and no less than {SMALLEST_TEMPERATURE}, got {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed}")
    if init not in ("draft", "target"):
        raise ValueError(f"init is 'draft' or 'target', got {init!r}")
    if stop is not None and not callable(stop) and not 0.0 <= stop <= 1.0:
        raise ValueError(f"stop is a confidence within 0..1, got {stop}")
    if method != "ar":
        if draft is None:
            raise ValueError(f"method {method!r} needs a draft model")
        if draft.config.vocab_size != vocab_size:
            raise ValueError(
                f"draft and target must share one vocabulary: the draft has {draft.config.vocab_size} tokens, "
                f"the target {vocab_size}"
            )
    return min(len(tokens) + max_new_tokens, context_size)
