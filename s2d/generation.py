"""``generate`` and ``start``: from options to a Decoder."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from .decoder import Decoder
from .draft import Exit, LayerExit, SortedDraft
from .model import Llama
from .options import Options, make_options
from .rules import Greedy, Rejection, Rule, SharedNoise, TargetDraws
from .sampling import Draws, Noise
from .stats import Generation


def generate(
    target: Llama,
    tokens: Sequence[int] | torch.Tensor,
    draft: Llama | None = None,
    method: str | None = None,
    **options: Any,
) -> Generation:
    """Continue ``tokens`` by speculative decoding.

    The text is what ``target`` alone would write, up to rounding. With ``rule="rejection"`` it is a
    draw from the same distribution. With ``init="target"`` as well, a tree is not lossless, as
    published (mcsd/roots.py).

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
    target: Llama,
    tokens: Sequence[int] | torch.Tensor,
    draft: Llama | None = None,
    method: str | None = None,
    **options: Any,
) -> Decoder:
    """As ``generate``, but nothing has happened yet: iterate over the Decoder that is returned."""
    for name, model in (("target", target), ("draft", draft)):
        if not isinstance(model, Llama) and not (name == "draft" and model is None):
            raise ValueError(f"the {name} is a model of load_model, not {model!r:.60}")
    asked = make_options(method=method, **options)
    options = asked.filled(None if draft is None else draft.config)
    context = as_ids(tokens, target.config.vocab_size)
    size = target.config.max_position_embeddings
    if not 0 < len(context) < size:
        raise ValueError(f"the prompt has {len(context)} tokens; expected 1 to {size - 1}")
    limit = min(len(context) + options.max_new_tokens, size)
    rule = make_rule(target, options)
    drafter = make_draft(target, draft, options, limit)
    is_last = options.stop_at.begin() if options.stop_at else lambda token: False
    arguments = (target, drafter, rule, context, limit, options, is_last)
    if options.init == "target" or options.decision is not None:
        from .mcsd import make_decoder  # improved MCSD

        return make_decoder(*arguments)
    return Decoder(*arguments)


def as_ids(tokens: Sequence[int] | torch.Tensor, vocab_size: int) -> list[int]:
    """The ids of a prompt as a list. ``tokens``: a list, tensor or array, (T,) or (1, T)."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    try:
        ids = [index(token) for token in ids]  # plain ints
    except TypeError:
        shown = " ".join(repr(tokens).split())
        raise ValueError(f"a prompt is a list of ids, not {shown:.80}") from None
    if not all(0 <= token < vocab_size for token in ids):
        raise ValueError(f"the prompt's ids are not all within 0..{vocab_size - 1}")
    return ids


def make_rule(target: Llama, options: Options) -> Rule:
    """The rule that ``options`` ask for."""
    if not isinstance(options.rule, str):
        if isinstance(options.rule, Rejection) and not options.shape.sends_all:
            raise ValueError("Rejection needs a tree that is sent whole; give TargetDraws")
        return options.rule
    if options.temperature == 0:
        return Greedy()
    # Without a draft there is nothing to reject: the text is always the one that the noise gives.
    if options.rule == "noise" or options.method == "ar":
        dtype = torch.promote_types(target.dtype, torch.float32)  # float32 or better
        noise = Noise(options.seed, target.config.vocab_size, target.device, dtype)
        return SharedNoise(options.distribution, noise)
    kind = Rejection if options.shape.sends_all else TargetDraws
    return kind(options.distribution, Draws(options.seed))


def make_draft(target: Llama, draft: Llama | None, options: Options, limit: int) -> SortedDraft:
    """The draft that ``options`` ask for, with room for a context of ``limit`` tokens."""
    depth = 0 if draft is None else draft.config.num_hidden_layers
    vocab_size = target.config.vocab_size
    exits: list[Exit] = []
    previous = None
    for each in options.exits:
        if not isinstance(each, int):
            exits.append(each)
        elif each == 0:
            from .ngram.table import TableExit  # exit 0

            dtype = torch.promote_types(target.dtype, torch.float32)
            exits.append(TableExit(vocab_size, target.device, dtype, options.datastore))
        elif draft is None:
            raise ValueError(f"exit {each} needs a draft model")
        elif not 0 < each <= depth:
            raise ValueError(f"exits of {depth} draft layers: expected 1 to {depth}, got {each}")
        else:
            previous = LayerExit(draft, previous, each, capacity=limit + options.shape.capacity)
            exits.append(previous)
    if previous is not None and draft.device != target.device:
        raise ValueError(f"the draft is on {draft.device}, and the target on {target.device}")
    if previous is not None and draft.config.vocab_size != vocab_size:
        sizes = f"{draft.config.vocab_size} and {vocab_size} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")
    return SortedDraft(vocab_size, exits, options.thresholds, options.shape, options.stop)
