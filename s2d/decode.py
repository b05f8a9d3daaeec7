"""The draft-verify loop, once, for every method. Knows nothing about files or text.

A step is: draft a few tokens, run the target over all of them in one pass, keep what the verifier accepts and the one
token it adds. ``ar`` is the loop without a draft, ``sd`` has a draft with one exit, ``s2d`` one with several.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from .draft import Chain, SortedDraft
from .sampling import Sampler, warp
from .verify import verify_greedy, verify_sampled

METHODS = ("ar", "sd", "s2d")
DRAFT_LENGTH = 6


@dataclass
class Stats:
    """What a generation did. ``seconds`` is wall time without loading; the first step's target pass reads the prompt."""

    accept_lengths: list[int] = field(default_factory=list)  # tokens emitted in each step, the target's own included
    exit_counts: Counter = field(default_factory=Counter)  # exit layer -> draft tokens that left there
    seconds: float = 0.0

    @property
    def steps(self):
        return len(self.accept_lengths)

    @property
    def mean_accepted_tokens(self):
        """Tokens emitted per step; 1.0 for autoregressive decoding."""
        return sum(self.accept_lengths) / self.steps


@dataclass
class Output:
    """``tokens`` are the new ones only, with EOS last if it was produced; ``exact`` tells whether the method is lossless."""

    tokens: list[int]
    exact: bool
    stats: Stats


@torch.inference_mode()
def generate(
    target, tokens, draft=None, method="s2d", max_new_tokens=128, temperature=0.0, top_p=1.0, seed=0,
    exits=None, thresholds=None, draft_length=None, stop=None, on_tokens=None,
):  # fmt: skip
    """Continue ``tokens``, a list of ids, exactly as ``target`` alone would. Returns an Output.

    ``exits`` and ``thresholds`` (one for each exit, within 0..1; the last exit always drafts) default to the draft's
    config; "sd" uses the last exit only. A step drafts ``draft_length`` tokens (default DRAFT_LENGTH), fewer where the
    last exit's confidence falls below ``stop``. ``on_tokens`` is called with each step's new tokens. Ends at EOS, after
    ``max_new_tokens`` or where the target's context is full. Raises ValueError for anything that cannot be run.
    """
    start = time.perf_counter()
    draft_length = DRAFT_LENGTH if draft_length is None else draft_length
    limit = _check(target, tokens, draft, method, max_new_tokens, temperature, top_p, seed, draft_length, stop)
    n, stats, eos = len(tokens), Stats(), set(target.config.eos_token_ids)
    context = torch.zeros(1, limit, dtype=torch.long, device=target.device)
    context[0, :n] = torch.tensor(tokens)
    cache, sampler = target.new_cache(limit), Sampler(seed, target.device)
    drafter = None
    if method != "ar":
        exits, thresholds = choose_exits(draft.config, method, exits, thresholds)
        drafter, draft_limit = SortedDraft(draft, exits, thresholds, limit), draft.config.max_position_embeddings

    finished = False
    while not finished:
        chain = Chain(context[0, :0], None, [])
        if drafter:
            length = min(draft_length, limit - n - 1, draft_limit - n + 1)
            chain = drafter.grow_chain(context, n, length, temperature, top_p, sampler, stop)
        logits = _score(target, context, n, n + len(chain.tokens), cache)  # (N+1, V)
        if temperature == 0:
            accepted, extra = verify_greedy(logits, chain.tokens)
        else:
            accepted, extra = verify_sampled(warp(logits, temperature, top_p), chain.probs, chain.tokens, sampler)
        context[0, n + accepted] = extra
        cache.truncate(n + accepted)
        if drafter:
            drafter.truncate(n + accepted)

        new = context[0, n : n + accepted + 1].tolist()
        end = next((i for i, token in enumerate(new, 1) if token in eos), None)
        new = new[:end]
        n += len(new)
        finished = end is not None or n == limit
        stats.accept_lengths.append(len(new))
        stats.exit_counts.update(chain.exits)
        if on_tokens:
            on_tokens(new)
    stats.seconds = time.perf_counter() - start
    return Output(context[0, len(tokens) : n].tolist(), True, stats)


def _score(target, context, n, end, cache):
    """One target pass over what its cache lacks of context[:end]; logits (end-n+1, V) after each position from n-1 on."""
    seen = cache.length
    hidden = target.run_layers(target.embed(context[:, seen:end]), cache=cache)
    return target.logits(hidden[0, n - 1 - seen :])


def choose_exits(config, method, exits=None, thresholds=None):
    """The exits and thresholds a method uses with a draft; raises ValueError where they do not fit it."""
    depth = config.num_hidden_layers
    chosen = tuple(exits) if exits is not None else config.exit_layers or (depth,)
    if method == "sd" and exits is None:
        chosen = chosen[-1:]
    if method == "sd" and len(chosen) != 1:
        raise ValueError(f"method 'sd' drafts from one exit, got {list(chosen)}; use 's2d' for several")
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


def _check(target, tokens, draft, method, max_new_tokens, temperature, top_p, seed, draft_length, stop):
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
    if max_new_tokens < 1 or draft_length < 1:
        raise ValueError(f"lengths must be at least 1, got max_new_tokens={max_new_tokens}, draft_length={draft_length}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed}")
    if stop is not None and not 0.0 <= stop <= 1.0:
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
