"""``generate`` and ``start``: from options to a Decoder."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from math import inf
from operator import index
from typing import Any

import torch
import torch.nn.functional as F

from .decoder import Decoder
from .draft import Exit, LayerExit, SortedDraft
from .model import Llama
from .options import Options, expect, fill_in, make_shape, short, with_exit_0
from .rules import Greedy, Rejection, Rule, SharedNoise
from .sampling import Distribution, Draws
from .stats import Generation

Ids = Sequence[int] | torch.Tensor  # of a prompt: a list, tensor or array of shape (T,) or (1, T)
RULES = {"noise": SharedNoise, "rejection": Rejection}
# Vocabularies are padded for GPUs: of two models with one tokenizer, one may have so many tokens
# more. Llama 2 has 32,000 or 32,064, Llama 3 128,256 or 128,264. The limit is llama.cpp's.
PADDING = 128


def generate(target: Llama, tokens: Ids, draft: Llama | None = None, **options: Any) -> Generation:
    """Continue ``tokens`` by speculative decoding.

    The text is what ``target`` alone would write, up to rounding. With ``rule="rejection"`` it is a
    draw from the same distribution.

    Args:
        target: the model whose text is written.
        tokens: the ids of the prompt, a list, tensor or array of shape (T,) or (1, T).
        draft: a draft model; without one, exit 0 drafts alone.
        options: see ``Options`` and ``fill_in`` (options.py).

    Ends at EOS, at what ``stop_at`` finds, after ``max_new_tokens``, or when the target's context
    is full. Raises ValueError for what cannot be run.
    """
    return start(target, tokens, draft, **options).run()


def start(target: Llama, tokens: Ids, draft: Llama | None = None, **options: Any) -> Decoder:
    """As ``generate``, but no step is made yet: iterate over the Decoder that is returned."""
    return make_decoder(target, tokens, draft, decide(draft, **options))


def decide(draft: Any, **given: Any) -> Options:
    """The settings for a ``draft``: a ``Llama``, its folder, or None for exit 0 alone.

    The draft's defaults fill in what is not ``given`` (``options.fill_in``).
    """
    layers = 0 if draft is None else draft.config.num_hidden_layers
    own = {"exits": (0,)} if draft is None else {"exits": (layers,)} | draft.drafting
    try:
        options = fill_in(own, **given)
    except (AttributeError, RuntimeError, TypeError) as error:  # such as a name that there is not
        raise ValueError(f"options: {error}") from error
    if max(options.layers, default=0) > layers:
        words = f"the draft has {layers} layers" if layers else "there is no draft model"
        raise ValueError(f"exits {options.layers}: {words}")
    return options


def make_decoder(target: Llama, tokens: Ids, draft: Llama | None, options: Options) -> Decoder:
    """The Decoder of one answer: its exits, its rule and its shape are made for it alone."""
    options = replace(options, tree=make_shape(options.tree))
    context = as_ids(tokens, target.config.vocab_size)
    most = target.config.max_position_embeddings - 1
    if not 0 < len(context) <= most:
        raise ValueError(f"the prompt has {len(context)} tokens; expected 1 to {most}")
    exits = make_exits(target, draft, options)
    # Without a draft there is nothing to reject: the text is always the one that the noise gives.
    rule = options.rule if options.exits or callable(options.rule) else "noise"
    return (options.decoder or Decoder)(
        target=target,
        drafter=(options.drafter or SortedDraft)(exits, options, target.config.eos_token_ids),
        rule=make_rule(rule, options.distribution, Draws(options.seed)),
        context=context,
        options=options,
    )


def as_ids(tokens: Ids, vocab_size: int) -> list[int]:
    """The ids of a prompt as a list of plain ints."""
    try:
        ids = torch.as_tensor(tokens).tolist()
        if len(ids) == 1 and isinstance(ids[0], list):
            ids = ids[0]
        ids = [index(token) for token in ids]
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"a prompt is a list of ids, not {short(tokens)}") from None
    if not all(0 <= token < vocab_size for token in ids):
        raise ValueError(f"the prompt's ids are not all within 0..{vocab_size - 1}")
    return ids


def make_exits(target: Llama, draft: Llama | None, options: Options) -> list[Exit]:
    """The exits of an answer. Each exit with layers goes on from the one before it."""
    if options.exits and draft is not None:
        draft = with_vocabulary_of(target, draft)
    exits: list[Exit] = []
    previous = None
    for each in with_exit_0(options.exits):
        exit_ = each(target, draft) if callable(each) else LayerExit(draft, previous, each)
        if isinstance(exit_, LayerExit):
            previous = exit_
        exits.append(exit_)
    numbers = [each.exit_layer for each in exits]
    expect(len({*numbers}) == len(numbers), "exits: expected different numbers", numbers)
    return exits


def refuse_other_vocabulary(target: Any, draft: Any) -> None:
    """ValueError if the vocabularies of a target and a draft, models or folders, differ."""
    sizes = draft.config.vocab_size, target.config.vocab_size
    if abs(sizes[0] - sizes[1]) > PADDING:
        words = f"{sizes[0]} and {sizes[1]} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {words}")


def with_vocabulary_of(target: Llama, draft: Llama) -> Llama:
    """A ``draft`` that predicts the tokens of a ``target``, with the same weights.

    A token that only one of them has is never drafted. If the target emits it, the draft reads its
    own last token in its place.
    """
    refuse_other_vocabulary(target, draft)
    own_size = draft.config.vocab_size
    more = target.config.vocab_size - own_size  # padding by a negative number cuts
    if more == 0:
        return draft
    fitted = copy(draft)
    fitted.embed = lambda tokens: draft.embed(tokens.clamp(max=own_size - 1))
    fitted.logits = lambda hidden: F.pad(draft.logits(hidden), (0, more), value=-inf)
    return fitted


def make_rule(rule: str | Callable[..., Rule], distribution: Distribution, draws: Draws) -> Rule:
    """A rule by its name, or by the function that makes it."""
    kind = RULES[rule] if isinstance(rule, str) else rule
    if distribution.temperature == 0 and kind in RULES.values():
        kind = Greedy
    return kind(distribution, draws)
