"""``generate`` and ``start``: from options to a Decoder."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from .checked import CheckedExit, CheckedRule, CheckedShape
from .decoder import Decoder
from .draft import Exit, LayerExit, SortedDraft
from .model import Llama
from .options import Options, decide, expect, short
from .rules import Greedy, Rejection, Rule, SharedNoise
from .sampling import Draws
from .stats import Generation
from .tree import FixedShape, GrowingShape

Ids = Sequence[int] | torch.Tensor  # of a prompt: a list, tensor or array of shape (T,) or (1, T)


def generate(target: Llama, tokens: Ids, draft: Llama | None = None, **options: Any) -> Generation:
    """Continue ``tokens`` by speculative decoding.

    The text is what ``target`` alone would write, up to rounding. With ``rule="rejection"`` it is a
    draw from the same distribution.

    Args:
        target: the model whose text is written.
        tokens: the ids of the prompt, a list, tensor or array of shape (T,) or (1, T).
        draft: a draft model; without one, exit 0 drafts alone.
        options: see ``options.Options``, and what ``options.fill_in`` makes of them.

    Ends at EOS, at what ``stop_at`` finds, after ``max_new_tokens``, or when the target's context
    is full. Raises ValueError for what cannot be run.
    """
    return start(target, tokens, draft, **options).run()


def start(target: Llama, tokens: Ids, draft: Llama | None = None, **options: Any) -> Decoder:
    """As ``generate``, but no step is made yet: iterate over the Decoder that is returned."""
    return make_decoder(target, tokens, draft, decide(draft, **options))


def make_decoder(target: Llama, tokens: Ids, draft: Llama | None, options: Options) -> Decoder:
    """The Decoder of one answer: its exits and its rule are made for it alone.

    What is not ours is wrapped here (checked.py), so that the loop need not check it.
    """
    context = as_ids(tokens, target.config.vocab_size)
    size = target.config.max_position_embeddings
    if not 0 < len(context) < size:
        raise ValueError(f"the prompt has {len(context)} tokens; expected 1 to {size - 1}")
    exits = make_exits(target, draft, options)
    shape = options.shape
    if type(shape) not in (FixedShape, GrowingShape):
        shape = CheckedShape(shape)
    drafter = SortedDraft(exits, shape, options, target.config.eos_token_ids)
    kind = Decoder
    if options.init == "target":
        from .mcsd.roots import RootsDecoder  # improved MCSD

        kind = RootsDecoder
    rule = make_rule(options, Draws(options.seed))
    decoder = kind(target, drafter, rule, context, options)
    if options.decision is not None:
        from .mcsd.decision import DecisionRule  # improved MCSD

        decoder.rule = DecisionRule(decoder.rule, options.decision)
    return decoder


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
    vocab_size = target.config.vocab_size
    if draft is not None and draft.config.vocab_size != vocab_size:
        sizes = f"{draft.config.vocab_size} and {vocab_size} tokens"
        raise ValueError(f"draft and target must share a vocabulary, not have {sizes}")
    exits: list[Exit] = []
    previous = None
    for each in options.exits:
        if each == 0:
            from .ngram.table import TableExit  # exit 0

            if options.datastore is not None:
                from .ngram.datastore import check_datastore

                check_datastore(options.datastore, vocab_size)
            exits.append(TableExit(vocab_size, target.device, target.dtype, options.datastore))
        elif isinstance(each, int):
            previous = LayerExit(draft, previous, each)
            exits.append(previous)
        else:
            made = each(target, draft)
            if isinstance(made, LayerExit):
                previous = made
            exits.append(CheckedExit(made, vocab_size))
    numbers = [each.exit_layer for each in exits]
    expect(len(set(numbers)) == len(numbers), "each exit has a number of its own", numbers)
    return exits


def make_rule(options: Options, draws: Draws) -> Rule:
    """The rule of an answer."""
    if not isinstance(options.rule, str):
        return CheckedRule(options.rule(options.distribution, draws), options.shape.prunes)
    if options.temperature == 0:
        return Greedy(options.distribution, draws)
    # Without a draft there is nothing to reject: the text is always the one that the noise gives.
    if options.rule == "rejection" and options.exits:
        return Rejection(options.distribution, draws, chosen=options.shape.prunes)
    return SharedNoise(options.distribution, draws)
