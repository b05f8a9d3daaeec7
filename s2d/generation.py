"""``generate`` and ``start``: from options to a Decoder."""

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from operator import index
from typing import Any

import torch

from .decoder import Decoder
from .draft import LayerExit, SortedDraft
from .model import Llama
from .options import Options, Plan
from .own import short
from .rules import Exit, Greedy, Rejection, Rule, SharedNoise
from .sampling import Draws, Noise
from .stats import Generation
from .tree import FixedShape

Ids = Sequence[int] | torch.Tensor  # of a prompt: a list, tensor or array of shape (T,) or (1, T)


def generate(
    target: Llama,
    tokens: Ids,
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
    tokens: Ids,
    draft: Llama | None = None,
    method: str | None = None,
    **options: Any,
) -> Decoder:
    """As ``generate``, but no step is made yet: iterate over the Decoder that is returned."""
    return make_decoder(target, tokens, draft, make_plan(draft, method=method, **options))


def make_plan(draft: Llama | None, **given: Any) -> Plan:
    """What is decided for a ``draft``, from options by their names."""
    if not isinstance(draft, Llama | None):
        raise ValueError(f"the draft is a model of load_model, not {short(draft)}")
    names = [field.name for field in fields(Options)]
    for name in given:
        if name not in names:
            nearest = get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
            raise ValueError(f"unknown option {name!r}; {hint}")
    return Options(**given).plan(None if draft is None else draft.config)


def make_decoder(target: Llama, tokens: Ids, draft: Llama | None, plan: Plan) -> Decoder:
    """As ``start``, for a ``plan`` that was made for this ``draft``."""
    if not isinstance(target, Llama):
        raise ValueError(f"the target is a model of load_model, not {short(target)}")
    context = as_ids(tokens, target.config.vocab_size)
    size = target.config.max_position_embeddings
    if not 0 < len(context) < size:
        raise ValueError(f"the prompt has {len(context)} tokens; expected 1 to {size - 1}")
    exits = make_exits(target, draft, plan)
    drafter = SortedDraft(target.config.vocab_size, exits, plan)
    rule = make_rule(target, plan)
    if plan.options.decision is not None:
        if not all(isinstance(each, LayerExit) for each in exits):
            raise ValueError("a decision model judges exits with layers")
        plan.options.decision.prepare_for(exits[0].model)
        drafter.estimate = plan.options.decision.estimate
    if plan.options.init == "target":
        from .mcsd.roots import RootsDecoder  # improved MCSD

        return RootsDecoder(target, drafter, rule, context, plan)
    return Decoder(target, drafter, rule, context, plan)


def as_ids(tokens: Ids, vocab_size: int) -> list[int]:
    """The ids of a prompt as a list of plain ints."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    try:
        ids = [index(token) for token in ids]
    except TypeError:
        raise ValueError(f"a prompt is a list of ids, not {short(tokens)}") from None
    if not all(0 <= token < vocab_size for token in ids):
        raise ValueError(f"the prompt's ids are not all within 0..{vocab_size - 1}")
    return ids


def make_rule(target: Llama, plan: Plan) -> Rule:
    """The rule that is asked for."""
    options = plan.options
    if not isinstance(options.rule, str):
        return options.rule
    if options.temperature == 0:
        return Greedy()
    # Without a draft there is nothing to reject: the text is always the one that the noise gives.
    if options.rule == "rejection" and plan.method != "ar":
        chosen = not isinstance(plan.shape, FixedShape)  # another shape may leave out nodes
        return Rejection(options.distribution, Draws(options.seed), chosen)
    dtype = torch.promote_types(target.dtype, torch.float32)  # float32 or better
    noise = Noise(options.seed, target.config.vocab_size, target.device, dtype)
    return SharedNoise(options.distribution, noise)


def make_exits(target: Llama, draft: Llama | None, plan: Plan) -> list[Exit]:
    """The exits that draft. Each exit with layers goes on from the one before it."""
    exits: list[Exit] = []
    previous = None
    for each in plan.exits:
        if not isinstance(each, int):
            exits.append(each)
        elif each == 0:
            from .ngram.table import TableExit  # exit 0

            dtype = torch.promote_types(target.dtype, torch.float32)
            vocab_size = target.config.vocab_size
            exits.append(TableExit(vocab_size, target.device, dtype, plan.options.datastore))
        else:
            previous = LayerExit(draft, previous, each)
            exits.append(previous)
    if previous is not None and draft.device != target.device:
        raise ValueError(f"the draft is on {draft.device}, and the target on {target.device}")
    if previous is not None and draft.config.vocab_size != target.config.vocab_size:
        sizes = f"{draft.config.vocab_size} and {target.config.vocab_size} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")
    return exits
