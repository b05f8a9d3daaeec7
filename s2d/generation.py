"""``generate`` and ``start``: options become a Decoder."""

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch

from .decoder import Decoder, Generation, Target
from .draft import Exit, LayerExit, SortedDraft
from .model import Llama
from .options import Options, Settings, check_whole, drafting_of, resolve
from .roots import LongestPath, RootsDecoder
from .rules import Greedy, Rejection, Rule, SharedNoise, TargetDraws
from .sampling import Draws, Noise


def generate(
    target: Target,
    tokens: Sequence[int] | torch.Tensor,
    draft: Llama | None = None,
    method: str | None = None,
    **options: Any,
) -> Generation:
    """Continue ``tokens`` by speculative decoding.

    The text is what ``target`` alone would write, up to rounding. With ``rule="rejection"`` it is a
    draw from the same distribution, unless ``init`` is "target" (roots.py).

    Args:
        target: the model whose text is written.
        tokens: the ids of the prompt, a list, tensor or array of shape (T,) or (1, T).
        draft: a draft model; without one, exit 0 drafts alone.
        method, options: see ``Options``.

    Ends at EOS, at what ``stop_at`` finds, after ``max_new_tokens``, or when the target's context
    is full. Raises ValueError for anything that cannot be run.
    """
    return start(target, tokens, draft, method, **options).run()


def start(
    target: Target,
    tokens: Sequence[int] | torch.Tensor,
    draft: Llama | None = None,
    method: str | None = None,
    **options: Any,
) -> Decoder:
    """As ``generate``, but nothing has happened yet: iterate over the Decoder that is returned."""
    settings = settings_for(target, draft, Options(method, **options))
    return make_decoder(target, tokens, draft, settings)


def settings_for(target: Target, draft: Llama | None, options: Options, batch: int = 1) -> Settings:
    """``options`` with nothing left to decide, for ``batch`` prompts that share a target pass.

    Raises ValueError for what cannot be run with these models.
    """
    batch = check_whole("batch", batch, 1)
    if draft is None:
        settings = resolve(options, target.config)
    else:
        settings = resolve(options, target.config, draft.config, drafting_of(draft))
    prepare_models(settings, target, draft)
    if options.stop is None:
        settings = fit_costs(settings, target, batch)
    return settings


def prepare_models(settings: Settings, target: Target, draft: Llama | None) -> None:
    """Move the decision model to the others' device; ValueError if they do not fit together."""
    if draft is not None and settings.method != "ar":
        if draft.device != target.device:
            places = f"{draft.device} and {target.device}"
            raise ValueError(f"draft and target must be on one device, not on {places}")
        if settings.decision is not None:
            settings.decision.prepare_for(draft)


def fit_costs(settings: Settings, target: Target, batch: int) -> Settings:
    """If exit 0 drafts alone, its shape and ``stop`` by what passes of the target cost.

    Not under rejection sampling, whose text depends on what is drafted and must not depend on
    clocks. With ``init="target"`` the first level has no estimates of exit 0's.
    """
    if settings.exits != (0,) or settings.rule != "noise" or settings.init != "draft":
        return settings
    from .ngram.costs import fit_shape  # exit 0's own

    shape, stop = fit_shape(target, settings.shape, settings.stop, batch)
    return replace(settings, shape=shape, stop=stop)


def make_decoder(
    target: Target,
    tokens: Sequence[int] | torch.Tensor,
    draft: Llama | None,
    settings: Settings,
    decoder: type[Decoder] = Decoder,
    roots_decoder: type[RootsDecoder] = RootsDecoder,
) -> Decoder:
    """A Decoder for ``settings``. Raises ValueError if the prompt cannot be continued.

    It is a ``decoder`` or, with roots from the target, a ``roots_decoder``.
    """
    context = as_ids(tokens)
    size = target.config.max_position_embeddings
    vocab_size = target.config.vocab_size
    if not 0 < len(context) < size:
        raise ValueError(f"the prompt has {len(context)} tokens; expected 1 to {size - 1}")
    if not all(0 <= token < vocab_size for token in context):
        raise ValueError(f"the prompt's ids are not all within 0..{vocab_size - 1}")
    limit = min(len(context) + settings.max_new_tokens, size)
    rule = make_rule(target, settings)
    if settings.method == "ar":
        return decoder(target, None, rule, context, limit, settings)
    drafter = make_drafter(target, draft, settings, limit)
    if settings.init == "target":
        decoder = roots_decoder
        if settings.rule == "rejection":
            rule = LongestPath(rule, roots=settings.shape.width(0))
    return decoder(target, drafter, rule, context, limit, settings)


def as_ids(tokens: Sequence[int] | torch.Tensor) -> list[int]:
    """The ids of a prompt as a list. ``tokens``: a list, tensor or array, (T,) or (1, T)."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    try:
        return [index(token) for token in ids]  # plain ints
    except TypeError:
        shown = " ".join(repr(tokens).split())
        raise ValueError(f"a prompt is a list of ids, not {shown:.80}") from None


def make_rule(target: Target, settings: Settings) -> Rule:
    """The rule that ``settings`` ask for."""
    if not isinstance(settings.rule, str):
        if isinstance(settings.rule, Rejection) and not settings.shape.sends_all:
            raise ValueError("Rejection needs a tree that is sent whole; give TargetDraws")
        return settings.rule
    if settings.temperature == 0:
        return Greedy()
    vocab_size = target.config.vocab_size
    # Plain decoding has nothing to reject: it always writes the text that the noise gives.
    if settings.rule == "noise" or settings.method == "ar":
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        noise = Noise(settings.seed, vocab_size, target.device, dtype)
        return SharedNoise(settings.distribution, noise)
    if settings.shape.sends_all:
        return Rejection(settings.distribution, vocab_size, Draws(settings.seed))
    return TargetDraws(settings.distribution, Draws(settings.seed))


def make_drafter(
    target: Target, draft: Llama | None, settings: Settings, limit: int
) -> SortedDraft:
    """The draft that ``settings`` ask for, with room for a context of ``limit`` tokens."""
    exits: list[Exit] = []
    previous = None
    for exit_ in settings.exits:
        if exit_ == 0:
            from .ngram.table import TableExit  # exit 0

            exits.append(TableExit(settings.datastore, target.device))
        elif isinstance(exit_, int):
            previous = LayerExit(
                draft,
                previous,
                exit_layer=exit_,
                capacity=limit + settings.shape.capacity,
                vocab_size=target.config.vocab_size,
            )
            exits.append(previous)
        else:
            exits.append(exit_)
    return SortedDraft(exits, settings.thresholds, settings.shape, settings.stop, settings.decision)
